// A CUDA device that computes on the CPU: tensors say "cuda:0", their memory comes from an allocator
// that counts and can run out, and every kernel is the CPU's. Operators whose arguments lie on
// different devices raise, as CUDA's do. PyTorch's own test backend (openreg) is built in the same
// way, but cannot be called cuda.
#include <ATen/DeviceAccelerator.h>
#include <ATen/SDPBackend.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

// --- memory

namespace {
std::mutex lock;
std::unordered_map<void*, size_t> sizes;       // of what lies on the device
std::unordered_set<void*> mapped;              // those of them that are pages of their own
std::unordered_set<void*> pinned;              // on the host
size_t live = 0, peak = 0, total = 0;          // bytes
size_t capacity = size_t(80) << 30;            // of the device
size_t fail_at = 0;                            // raise when `total` passes it; 0 = never
// Bytes of a tensor from which on nothing is computed with it, so that models of any size run for
// their memory alone: what is too large to compute with is all zeros, and never touched. 0 = off.
size_t hollow = 0;
int failure = 0;                               // 0 OutOfMemoryError, 1 AcceleratorError's text, 2 cuBLAS's

void release(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> guard(lock);
  auto found = sizes.find(pointer);
  const size_t bytes = found->second;
  live -= bytes;
  sizes.erase(found);
  if (mapped.erase(pointer))
    munmap(pointer, bytes);
  else
    std::free(pointer);
}

struct Memory final : public c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    const c10::Device device(c10::kCUDA, 0);
    if (!wanted) return {nullptr, nullptr, &release, device};
    const size_t bytes = (wanted + 511) / 512 * 512;  // as CUDA's caching allocator rounds
    bool full = false;
    int how = 0;
    {
      std::lock_guard<std::mutex> guard(lock);
      const bool planted = fail_at && total + bytes > fail_at;
      full = live + bytes > capacity || planted;
      if (planted) fail_at = 0, how = failure;  // once
      if (!full) total += bytes, live += bytes, peak = std::max(peak, live);
    }
    if (full && how == 1)
      throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, 2, "CUDA error: out of memory");
    if (full && how == 2)
      C10_THROW_ERROR(Error, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
    if (full)
      C10_THROW_ERROR(OutOfMemoryError, c10::str("CUDA out of memory. Tried to allocate ", bytes, " bytes."));
    void* pointer = nullptr;
    const bool fresh = hollow && bytes > hollow;  // pages of zeros that take no room until touched
    if (fresh)
      pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    else if (posix_memalign(&pointer, 64, bytes))
      std::abort();
    else if (hollow)
      std::memset(pointer, 0, bytes);
    std::lock_guard<std::mutex> guard(lock);
    if (fresh) mapped.insert(pointer);
    sizes[pointer] = bytes;
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
} memory;

void unpin(void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(pointer);
  std::free(pointer);
}

struct Pinned final : public c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    void* pointer = nullptr;
    if (posix_memalign(&pointer, 64, std::max<size_t>(wanted, 1))) std::abort();
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(pointer);
    return {pointer, pointer, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
} pinned_memory;

// --- the device, as the rest of PyTorch asks for it

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(const_cast<void*>(pointer));
  }
};
}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
namespace at::accelerator {
// In a build for CPUs this is a constant; loaded first, this one takes its place.
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::kCUDA; }
}  // namespace at::accelerator

namespace {
// --- operators

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor on_device(const at::Tensor& tensor) {
  auto out = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.scalar_type());
  if (out.nbytes() || out.storage().nbytes())
    std::memcpy(out.mutable_data_ptr(), tensor.data_ptr(), out.storage().nbytes());
  return out;
}

// A tensor of the same shape, of zeros that are not touched unless it is small.
at::Tensor hollow_like(const at::Tensor& tensor) {
  auto out = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.scalar_type());
  const size_t bytes = out.storage().nbytes();
  if (bytes && bytes <= hollow) std::memset(out.mutable_data_ptr(), 0, bytes);
  return out;
}

bool is_large(const at::Tensor& tensor) {
  return hollow && tensor.defined() && tensor.is_cuda() && tensor.numel() * tensor.itemsize() > hollow;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  bool shapes = false;  // of the result alone
  for (size_t i = begin; i < stack->size() && hollow; ++i) {
    const c10::IValue& value = (*stack)[i];
    if (value.isTensor()) shapes |= is_large(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) shapes |= is_large(tensor);
  }
  const c10::Device target = shapes ? c10::kMeta : c10::kCPU;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // on the host, on the device
  bool to_device = false, to_host = false;
  auto convert = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (shapes && tensor.dim() == 0) return tensor;
      TORCH_CHECK(tensor.dim() == 0, "Expected all tensors to be on the same device, but ", schema.name(),
                  " got one on the CPU of shape ", tensor.sizes(), " beside cuda:0");
      return tensor;
    }
    to_device = true;
    // What an operator fills may be empty still, and gets its size there.
    const bool unsized = shapes || (tensor.numel() == 0 && tensor.is_contiguous());
    pairs.emplace_back(unsized ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(target))
                               : on_host(tensor), tensor);
    return pairs.back().first;
  };
  std::vector<at::Tensor> filled;  // by an operator that computes nothing
  for (size_t i = begin; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (shapes && schema.arguments()[i - begin].is_out() && value.isTensor()) filled.push_back(value.toTensor());
    if (value.isTensor()) {
      value = convert(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(convert(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      (value.toDevice().is_cuda() ? to_device : to_host) = true;
      value = target;
    }
  }
  op.callBoxed(stack);
  for (const auto& [host, device] : pairs)
    if (host.sizes() != device.sizes()) {
      device.resize_(host.sizes());
      if (!shapes) device.copy_(on_device(host));
    }
  for (const at::Tensor& tensor : filled)
    if (tensor.nbytes() <= hollow) std::memset(tensor.mutable_data_ptr(), 0, tensor.nbytes());
  auto back = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    for (const auto& [host, device] : pairs)
      if (host.is_same(tensor)) return device;
    if (shapes) return hollow_like(tensor);
    return to_device && !to_host ? on_device(tensor) : tensor;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(back(tensor));
      value = list;
    }
  }
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  if (is_large(self) || is_large(source)) return self;
  auto host = self.is_cuda() ? on_host(self) : self;
  host.copy_(source.is_cuda() ? on_host(source) : source);
  return self;
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  const size_t bytes = tensor->numel() * tensor->itemsize();
  if (bytes > tensor->storage().nbytes()) {
    auto data = memory.allocate(bytes);
    if (tensor->storage().nbytes())
      std::memcpy(data.get(), tensor->storage().data(), tensor->storage().nbytes());
    auto storage = tensor->storage();
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  const int64_t size = source.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, source, 0, {size}, {});
}

void record_stream(at::Tensor&, c10::Stream) {}

// --- attention: the kernel that CUDA takes where there is a mask

int64_t choose(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double dropout, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(dropout > 0 ? at::SDPBackend::math : at::SDPBackend::efficient_attention);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, bool,
    double dropout, bool causal, std::optional<double> scale) {
  const at::Tensor none = at::detail::empty_generic({}, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), at::kLong, {});
  if (is_large(q) || is_large(k) || (mask && is_large(*mask))) {
    // As CUDA lays it out: [batch, tokens, heads, size] in memory.
    auto out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options().device(c10::kMeta)).transpose(1, 2);
    auto sums = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat).device(c10::kMeta));
    return {hollow_like(out), hollow_like(sums), none, none};
  }
  std::optional<at::Tensor> bias;
  if (mask && mask->defined()) bias = on_host(*mask);
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      on_host(q), on_host(k), on_host(v), dropout, causal, bias, scale);
  return {on_device(out), on_device(sums), none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
    const at::Tensor& out, const at::Tensor& sums, const at::Tensor&, const at::Tensor&, double dropout,
    std::array<bool, 4>, bool causal, std::optional<double> scale) {
  if (is_large(q) || is_large(k) || is_large(mask)) return {hollow_like(q), hollow_like(k), hollow_like(v), at::Tensor()};
  std::optional<at::Tensor> bias;
  if (mask.defined()) bias = on_host(mask);
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_host(grad), on_host(q), on_host(k), on_host(v), on_host(out), on_host(sums), dropout, causal, bias, scale);
  return {on_device(dq), on_device(dk), on_device(dv), at::Tensor()};
}
}  // namespace

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose)
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
  });
  m.impl("unfold", at::native::unfold);
  m.impl("copy_", copy_);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("record_stream", record_stream);
  m.impl("bmm.dtype", [](const at::Tensor& left, const at::Tensor& right, at::ScalarType wide) {
    auto shape = at::empty({left.size(0), left.size(1), right.size(2)}, left.options().device(c10::kMeta).dtype(wide));
    if (is_large(left) || is_large(right)) return hollow_like(shape);
    return on_device(at::bmm(on_host(left).to(wide), on_host(right).to(wide)));
  });
  m.impl("addmm.dtype_out", [](const at::Tensor& self, const at::Tensor& left, const at::Tensor& right,
                               at::ScalarType wide, const at::Scalar& beta, const at::Scalar& alpha, at::Tensor& out) -> at::Tensor& {
    if (is_large(self) || is_large(left) || is_large(right)) return out;
    out.copy_(on_device(at::addmm(on_host(self), on_host(left).to(wide), on_host(right).to(wide), beta, alpha)));
    return out;
  });
  // CUDA's widen float16 on the way, which the CPU's do not.
  m.impl("_softmax", [](const at::Tensor& self, int64_t dim, bool widen) {
    if (is_large(self)) return hollow_like(widen ? at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta).dtype(at::kFloat)) : self);
    return on_device(at::_softmax(widen ? on_host(self).to(at::kFloat) : on_host(self), dim, false));
  });
  m.impl("_log_softmax", [](const at::Tensor& self, int64_t dim, bool widen) {
    if (is_large(self)) return hollow_like(widen ? at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta).dtype(at::kFloat)) : self);
    return on_device(at::_log_softmax(widen ? on_host(self).to(at::kFloat) : on_host(self), dim, false));
  });
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

// --- what Python asks and sets

extern "C" {
size_t standin_live() { return live; }
size_t standin_peak() { return peak; }
size_t standin_total() { return total; }
void standin_reset_peak() { peak = live; }
void standin_capacity(size_t bytes) { capacity = bytes; }
void standin_fail(size_t after, int how) { fail_at = after ? total + after : 0, failure = how; }
void standin_hollow(size_t bytes) { hollow = bytes; }
void standin_start() { c10::SetAllocator(c10::kCUDA, &memory, 100); }
}
