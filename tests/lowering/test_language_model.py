"""Which language models attend through caches: sizes of keys and values, and models with other state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_pytorch.lowering.language_model import CachedLanguageModel, require_history
from kernel_pytorch.testing.checkpoints import tiny_checkpoint

transformers = pytest.importorskip("transformers")

LATENT = {
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 12, "q_lora_rank": 16,
    "kv_lora_rank": 16, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip


def model(folder: Path, kind: str, **sizes: Any) -> Any:
    tiny_checkpoint(folder, kind, **sizes)
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("batched_mm")
    return made


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        ("llama", {}, (2, 16, 16)),
        ("gpt2", {}, (4, 16, 16)),  # no field of its own for heads of keys
        ("gpt_bigcode", {}, (1, 16, 16)),  # one head of keys, under a name of its own
        ("deepseek_v3", LATENT, (4, 24, 12)),  # values narrower than keys
        ("stablelm", {}, (2, 16, 16)),  # does not pass unknown arguments on to its attention
    ],
)
def test_caches_have_the_sizes_of_keys_and_values(
    tmp_path: Path, kind: str, sizes: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    made = model(tmp_path, kind, **sizes)
    require_history(made)
    cache = CachedLanguageModel(made, window=8).caches[0]
    assert (cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]) == expected


@pytest.mark.parametrize(
    ("kind", "sizes", "reason"),
    [
        ("bloom", {}, "layers 0, 1 do not attend"),  # with ALiBi
        ("gptj", {"rotary_dim": 8}, "layers 0, 1 do not attend"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers 0 do not attend"),
        ("mamba", {}, "layers 0, 1 do not attend"),
        ("falcon_h1", {}, "its logits have a relative error"),  # attention and a recurrence in each layer
        ("gemma2", {}, "softcap"),
    ],
)
def test_a_model_with_other_state_is_refused(tmp_path: Path, kind: str, sizes: dict[str, Any], reason: str) -> None:
    made = model(tmp_path, kind, **sizes)
    with pytest.raises(ValueError, match=rf"{reason}.*without a cache, with kp\.lower"):
        require_history(made)
