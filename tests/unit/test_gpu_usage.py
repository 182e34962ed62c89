"""The reader of utilisation and energy, on a stand-in for NVML."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from common.report import gpu_usage
from common.report.gpu_usage import Reader, Seen, Usage, find_handle, open_reader, summarise
from tests.support import nvml
from tests.support.nvml import Gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch):
    """Put devices into the machine; uuid: what torch says of each of them, None = nothing."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def build(*gpus: Gpu, uuids: tuple[str | None, ...] = (None,) * 8, **more):
        found = nvml.module(gpus, **more)
        monkeypatch.setitem(sys.modules, "pynvml", found)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i])
        )
        return found

    return build


@pytest.fixture
def still(monkeypatch):
    """The thread reads nothing: tests call `look`."""
    monkeypatch.setattr(gpu_usage, "SECONDS", 1000.0)
    closed = []
    yield closed
    for reader in closed:
        reader.ended.set()


def read(still, *gpus: Gpu, looks: int = 1) -> Reader:
    reader = Reader(nvml.module(gpus), gpus[0])
    still.append(reader)
    for _ in range(looks - 1):
        reader.look()
    return reader


# --- the device of a rank


@pytest.mark.parametrize(
    ("visible", "index", "uuids", "wanted"),
    [
        (None, 1, (None, None), "GPU-bb"),
        ("2,0", 0, (None, None), "GPU-cc"),
        ("2,0", 1, (None, None), "GPU-aa"),
        ("GPU-c,GPU-a", 0, (None, None), "GPU-cc"),
        ("GPU-c,GPU-a", 1, (None, None), "GPU-aa"),
        ("0,1", 0, ("bb", "aa"), "GPU-bb"),  # CUDA numbers the faster device first
        (None, 1, ("bb", "aa"), "GPU-aa"),
        ("MIG-dd", 0, ("aa",), "MIG-dd"),
    ],
)
def test_a_rank_reads_the_device_that_it_computes_on(
    machine, monkeypatch, visible, index, uuids, wanted
):
    found = machine(Gpu("GPU-aa"), Gpu("GPU-bb"), Gpu("GPU-cc"), Gpu("MIG-dd"), uuids=uuids)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_handle(found, index).uuid == wanted


def test_gpu_usage_needs_gpu_package_and_driver(machine, monkeypatch):
    assert open_reader(torch.device("cpu")) is None
    machine(Gpu("GPU-aa"), fails="Driver Not Loaded")
    assert open_reader(CUDA) is None
    machine(Gpu("GPU-aa"), uuids=("zz",))
    assert open_reader(CUDA) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-z")
    machine(Gpu("GPU-aa"))
    assert open_reader(CUDA) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_reader(CUDA) is None


def test_a_thread_reads_until_it_is_closed(machine, monkeypatch):
    monkeypatch.setattr(gpu_usage, "SECONDS", 0.005)
    found = machine(Gpu("GPU-aa", utilisation=(40,)))
    reader = open_reader(CUDA)
    while len(reader.samples) < 4:
        time.sleep(0.005)
    assert set(reader.take(60).utilisation) == {40}
    reader.close()
    assert not reader.thread.is_alive()
    assert found.started == 0


# --- readings


def test_readings_of_an_event_are_its_own(still):
    reader = read(still, Gpu("GPU-aa", utilisation=(10, 20, 30, 90)), looks=3)
    first = reader.take(60)
    assert (first.utilisation, first.memory) == ([10, 20, 30], [25, 25, 25])
    assert first.joules == pytest.approx(3)  # of four readings of the counter, from the first on
    reader.look()
    second = reader.take(60)
    assert second.utilisation == [90]
    assert second.joules == pytest.approx(2)
    assert reader.take(60).utilisation == []


def test_what_was_before_an_event_is_left_out(still):
    reader = read(still, Gpu("GPU-aa", utilisation=(10, 20)))
    time.sleep(0.05)
    reader.look()
    assert reader.take(0.02).utilisation == [20], "the one before it is of an evaluation"


def test_a_part_of_a_mig_device_has_its_memory_alone(still):
    reader = read(still, Gpu("MIG-dd", utilisation=None, millijoules=None), looks=3)
    assert reader.take(60) == Seen([], [25, 25, 25], None)


def test_power_counts_where_there_is_no_counter_of_energy(still):
    gpu = Gpu("GPU-aa", millijoules=None, milliwatts=200_000)
    reader, began = read(still, gpu), time.monotonic()
    time.sleep(0.05)
    reader.look()
    seconds = time.monotonic() - began
    assert reader.take(60).joules == pytest.approx(200 * seconds, rel=0.5)


def test_missing_package_functions_count_as_unsupported(still):
    found = nvml.module([gpu := Gpu("GPU-aa")])
    del found.nvmlDeviceGetTotalEnergyConsumption
    reader = Reader(found, gpu)
    still.append(reader)
    assert reader.take(60).joules is None


# --- several ranks


def usage_of(*ranks: Seen | None) -> Usage:
    context = SimpleNamespace(gather_objects=lambda _: list(ranks))
    return Usage(context, None)


def test_ranks_put_their_devices_together():
    event = usage_of(Seen([10, 20], [50], 30.0), Seen([90], [70], 20.0)).measure(1.0, 500)
    assert event["samples"] == {"utilisation": [10, 20, 90], "memory": [50, 70]}
    assert event["utilisation_p50"] == 20
    assert (event["joules"], event["joules_per_1000_tokens"]) == (50, 100)


@pytest.mark.parametrize("other", [None, Seen([1], [1], None)])
def test_an_energy_of_some_ranks_alone_is_none(other):
    event = usage_of(Seen([10], [50], 30.0), other).measure(1.0, 500)
    assert "joules" not in event
    assert event["utilisation_p10"] >= 1


def test_an_event_without_tokens_or_readings():
    event = usage_of(Seen([], [], 5.0)).measure(0.1, 0)
    assert event == {"joules": 5.0, "tokens": 0}


# --- the whole run


def test_a_summary_is_of_all_readings_of_the_log():
    logged = [
        {"step": 1, "gpu": usage_of(Seen([0, 50], [20, 20], 10.0)).measure(1, 100)},
        {"step": 2},  # before the package was installed
        {"step": 3, "gpu": usage_of(Seen([100], [40], 20.0)).measure(1, 200)},
    ]
    found = summarise(logged)
    assert found["utilisation"] == {"p10": 10, "p50": 50, "p90": 90, "samples": 3}
    assert (found["joules"], found["joules_per_1000_tokens"]) == (30, 100)
    rows = gpu_usage.describe(found)
    assert rows["GPU utilisation"] == "p10 10 %, median 50 %, p90 90 % (3 readings)"
    assert rows["energy"] == "30 J, 100 J per 1,000 tokens"
    assert summarise([{"step": 1}]) is None
    assert gpu_usage.describe(None) == {}
