"""Sample with vLLM for `python -m benchmarks real`, in a Python environment without Clutch.

    PYTHON vllm_peer.py MODEL [ADAPTERS]

Every line on standard input is a piece of work, {"prompts": [[id, ...], ...], "samples": 8,
"new_tokens": 64}; the answer is the number of sampled tokens. With a folder of ADAPTERS, prompt i
is answered with the i-th of them.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")


def main() -> None:
    """Load the model, then answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model, *rest = sys.argv[1:]
    folders = sorted(Path(rest[0]).iterdir()) if rest else []
    adapters = [LoRARequest(f.name, i, str(f)) for i, f in enumerate(folders, 1)]
    options = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 1}
    llm = LLM(
        model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=256,
        disable_log_stats=True,
        **(options if adapters else {}),
    )
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        new = work["new_tokens"]
        sampling = SamplingParams(
            n=work["samples"], temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
        made = llm.generate(prompts, sampling, lora_request=adapters or None, use_tqdm=False)
        print(sum(len(o.token_ids) for row in made for o in row.outputs), file=answers, flush=True)


if __name__ == "__main__":
    main()
