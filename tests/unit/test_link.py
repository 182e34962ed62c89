"""The link to vLLM in another process, without a vLLM (tests/runs/test_vllm.py has one)."""

from common.sampling.remote.link import leave_out_ours

OF_TORCHRUN = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    **{"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"},
}


def test_the_process_has_nothing_of_our_ranks_and_of_our_allocator():
    """With torchrun's store vLLM would wait for half an hour; with expandable segments that it does
    not know of, its sleep mode gives no memory back.
    """
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "VLLM_LOGGING_LEVEL": "DEBUG"}
    kept["LOCAL_MODELS"] = "/models"  # a name of the user's that only begins alike
    kept["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"  # the user's, which vLLM reads
    ours = OF_TORCHRUN | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert leave_out_ours(kept | ours) == kept
