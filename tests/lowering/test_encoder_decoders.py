"""Encoder-decoders in one program of two methods: the tokens of Hugging Face's greedy generation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import kernel_pytorch as kp
from kernel_pytorch.cli import main
from kernel_pytorch.lowering import checkpoint, decoded, lower_encoder_decoder


def t5() -> tuple[torch.nn.Module, torch.Tensor]:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        initializer_factor=5.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), torch.randint(3, 64, (1, 11))


def whisper() -> tuple[torch.nn.Module, torch.Tensor]:
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=50,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        init_std=0.4, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), torch.randn(1, 16, 100)


def bart() -> tuple[torch.nn.Module, torch.Tensor]:
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, init_std=0.4,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config), torch.randint(3, 64, (1, 11))


def moonshine() -> tuple[torch.nn.Module, torch.Tensor]:
    config = transformers.MoonshineConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4, decoder_num_attention_heads=4, max_position_embeddings=64, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, initializer_range=0.4,
    )  # fmt: skip
    return transformers.MoonshineForConditionalGeneration(config), torch.randn(1, 16000)


def wanted(model: torch.nn.Module, x: torch.Tensor, count: int) -> list[int]:
    found = model.generate(x, max_new_tokens=count, do_sample=False)[0].tolist()
    found = found[1:] if found[0] == model.generation_config.decoder_start_token_id else found
    end = model.generation_config.eos_token_id
    return found if len(found) == count or found[-1] == end else [*found, end]  # Whisper's leaves the end out


@pytest.mark.parametrize("make", [t5, whisper, bart, moonshine], ids=lambda make: make.__name__)
def test_tokens_are_those_of_transformers(make: Callable[[], tuple[torch.nn.Module, torch.Tensor]]) -> None:
    torch.manual_seed(0)
    model, x = make()
    text = x.dtype == torch.int64
    length = torch.export.Dim("source", min=2, max=40) if text else None
    program = lower_encoder_decoder(model.eval(), x, length=length, longest=24)
    assert program.report.count("KernelPyTorchBackend", "kernel_pytorch_lowering::attention") > 2, program.report
    loaded = program.load()
    assert {"encode", "decode"} <= set(loaded.methods)
    first = list(decoded(loaded, x, max_tokens=16))
    assert first == wanted(model, x, 16)
    assert len(set(first)) > 1  # no model that repeats one token
    other = torch.randint(3, 64, (1, 23)) if text else torch.randn_like(x)
    assert list(decoded(loaded, other, max_tokens=16)) == wanted(model, other, 16)
    start = model.generation_config.decoder_start_token_id
    assert list(decoded(loaded, x, max_tokens=8, prompt=[start, *first[:3]])) == first[3:11]
    with pytest.raises(ValueError, match="prompt has 25 tokens: the program takes 1 to 24"):
        list(decoded(loaded, x, prompt=[start] * 25))


def test_a_checkpoint_folder_is_lowered_from_the_shell(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = t5()
    model.eval().save_pretrained(tmp_path / "t5")
    with pytest.raises(SystemExit) as done:
        main(["lower", "--hf", str(tmp_path / "t5"), "--out", str(tmp_path / "t5.pte"), "--recipe", "int8-dynamic"])
    assert not done.value.code
    loaded = kp.load(tmp_path / "t5.pte")
    assert len(list(decoded(loaded, x, max_tokens=5))) == 5


@pytest.mark.parametrize("make", [whisper, moonshine], ids=lambda make: make.__name__)
def test_speech_is_lowered_from_a_folder(
    make: Callable[[], tuple[torch.nn.Module, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SECONDS", 1)
    torch.manual_seed(0)
    model, x = make()
    model.eval().save_pretrained(tmp_path)
    loaded = kp.lowering.lower_checkpoint(tmp_path, kp.lowering.TextProgram()).load()
    assert list(decoded(loaded, x, max_tokens=12)) == wanted(model, x, 12)


def test_what_an_encoder_decoder_cannot_have_is_refused(tmp_path: Path) -> None:
    model, x = t5()
    model.save_pretrained(tmp_path)
    how = kp.lowering.TextProgram(window=16)
    with pytest.raises(ValueError, match=r"window=16, .*: encoder-decoders keep the whole output in float32"):
        kp.lowering.lower_checkpoint(tmp_path, how)
    with pytest.raises(ValueError, match="example has a batch of 2: pass one input"):
        lower_encoder_decoder(model, x.expand(2, -1))


def test_methods_of_models_of_their_own_need_the_same_names() -> None:
    model = torch.nn.LayerNorm(4).eval()
    with pytest.raises(
        ValueError, match=r"model has the methods \['a'\], inputs has \['b'\]: name the same in both"
    ):
        kp.lower({"a": model}, {"b": (torch.ones(1, 4),)})
