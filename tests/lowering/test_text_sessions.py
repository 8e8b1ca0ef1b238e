"""Sessions of one program: forks that share a prompt, checked programs, weights kept outside memory, the worker."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kernel_pytorch as kp
from kernel_pytorch.lowering import checkpoint, spool
from kernel_pytorch.lowering.checksum import ProgramFile, add_checksum
from kernel_pytorch.lowering.worker import Worker
from kernel_pytorch.testing.checkpoints import tiny_checkpoint

PROMPT = "once upon a time there was a lazy dog that kept the memory of a conversation"


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("how", [{}, {"window": 8, "sinks": 2, "cache_dtype": "int8"}], ids=["whole", "window"])
def test_forks_begin_with_the_prompt_that_was_computed_once(llama: Path, how: dict) -> None:
    first = kp.TextGenerator.from_pretrained(llama, **how)
    list(first.stream_tokens(first.tokenizer(PROMPT)["input_ids"], max_tokens=1))
    forks = [first.fork() for _ in range(2)]
    prompts = [first.tokenizer(f"{PROMPT} {end}")["input_ids"] for end in ("hello", "says the fox")]
    found = []
    for fork, ids in zip(forks, prompts, strict=True):
        list(fork.stream_tokens(ids, max_tokens=8))
        assert fork.last.reused_tokens > 10
        found.append(fork.last.tokens)
    for ids, tokens in zip(prompts, found, strict=True):
        fresh = kp.TextGenerator.from_pretrained(llama, **how)
        list(fresh.stream_tokens(ids, max_tokens=8))
        assert fresh.last.tokens == tokens
    assert found[0] != found[1]
    first.reset()
    first.generate(PROMPT, max_tokens=2)
    assert first.last.reused_tokens == 0


def test_a_chat_is_forked_with_its_messages(llama: Path) -> None:
    chat = kp.TextGenerator.from_pretrained(llama).chat()
    list(chat.stream("hello dog", max_tokens=4))
    other = chat.fork()
    answers = ["".join(one.stream("says the fox", max_tokens=6)) for one in (chat, other)]
    assert answers[0] == answers[1]
    assert chat.messages == other.messages
    assert other.messages is not chat.messages


def test_a_checked_program_is_not_read_again_and_a_changed_one_is(llama: Path, tmp_path: Path) -> None:
    program = tmp_path / "text.pte"
    checkpoint.lower_checkpoint(llama, checkpoint.TextProgram(chunk=16)).save(program)
    steps: list[str] = []
    digests = [checkpoint.load_cached(program, steps.append).digest for _ in range(2)]
    assert steps == ["verifying the program", "loading the program"]
    assert digests[0] == digests[1]
    damaged = bytearray(program.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    program.write_bytes(damaged)
    with pytest.raises(ValueError, match="its checksum is wrong"):
        checkpoint.load_cached(program, steps.append)


def bfloat16_copy(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    weights = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_bfloat16_weights_stay_so_and_tokens_are_those_of_float32(llama: Path, tmp_path: Path) -> None:
    folder = bfloat16_copy(llama, tmp_path / "narrow")
    wide, narrow = (checkpoint.lower_checkpoint(one, checkpoint.TextProgram()) for one in (llama, folder))
    matrices = sum(one.numel() for one in load_file(llama / "model.safetensors").values() if one.ndim == 2)
    assert wide.file.size - narrow.file.size > 1.9 * matrices
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = kp.TextGenerator(narrow.load(), transformers.AutoTokenizer.from_pretrained(folder))
    ids = generator.tokenizer(PROMPT, return_tensors="pt")
    wanted = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert generator.generate(PROMPT, max_tokens=24).tokens == tuple(wanted.tolist())


def test_large_weights_stand_outside_the_payload_and_are_deleted_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch.manual_seed(0)
    model, x = torch.nn.Linear(1024, 512).eval(), torch.randn(3, 1024)
    program = kp.lower(torch.nn.Sequential(model, torch.nn.RMSNorm(512)).eval(), (x,))
    assert [path.suffix for path in tmp_path.rglob("*")] == [".pte"]  # the program itself
    assert b"kernel_pytorch_" in program.buffer  # the name of the weights
    assert program.compare()[0].snr > 100
    loaded = program.load()
    kept = loaded.again()
    del program
    torch.testing.assert_close(kept(x), loaded(x), rtol=0, atol=0)


def test_a_full_disk_is_an_error_that_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool, "_write", full)
    with pytest.raises(OSError, match=r"no room for 0\.0 GB of packed weights in .*name another folder in TMPDIR"):
        spool.Spool().keep(torch.ones(spool.LEAST_BYTES))
    assert list(tmp_path.iterdir()) == []


def test_a_program_file_has_the_checksum_of_what_was_written() -> None:
    made = ProgramFile(lambda file: [file.write(part) for part in (b"pro", b"gram")])
    path = made.path
    assert path.read_bytes() == add_checksum(b"program")
    del made
    assert not path.exists()


def asked(worker: Worker, out: io.StringIO, request: dict) -> list[dict]:
    out.seek(0)
    out.truncate()
    worker.answer(request)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_the_worker_answers_with_sessions_of_their_own(llama: Path) -> None:
    generator = kp.TextGenerator.from_pretrained(llama)
    wanted = generator.generate(PROMPT, max_tokens=8)
    generator.reset()
    out = io.StringIO()
    worker = Worker(generator, out, most_sessions=1)
    *pieces, done = asked(worker, out, {"prompt": PROMPT, "max_new_tokens": 8, "session_id": "a"})
    assert "".join(piece["token"] for piece in pieces) == wanted.text
    assert done["generated_token_ids"] == list(wanted.tokens)
    assert (done["finish_reason"], done["reused_prompt_tokens"]) == ("length", 0)
    segments = [{"text": PROMPT}, {"ids": list(wanted.tokens)}, {"text": "hello"}]
    *_, again = asked(worker, out, {"prompt_segments": segments, "max_new_tokens": 2, "session_id": "a"})
    assert again["reused_prompt_tokens"] >= wanted.prompt_tokens + 7
    (full,) = asked(worker, out, {"op": "open", "session_id": "b"})
    assert full["code"] == "capacity_exhausted"
    assert asked(worker, out, {"op": "close", "session_id": "a"}) == [{"closed": True}]
    assert asked(worker, out, {"op": "open", "session_id": "b"}) == [{"opened": True}]
    assert asked(worker, out, {"op": "reset", "session_id": "b"}) == [{"reset": True}]
    assert "error" in asked(worker, out, {"prompt": PROMPT * 60})[0]
    assert "top_k=3" in asked(worker, out, {"prompt": PROMPT, "top_k": 3})[0]["error"]


def test_the_worker_leaves_out_a_stop_string_that_comes_in_pieces(llama: Path) -> None:
    generator = kp.TextGenerator.from_pretrained(llama)
    text = generator.generate(PROMPT, max_tokens=20).text
    stop = text[6:10]
    out = io.StringIO()
    *pieces, done = asked(
        Worker(generator, out), out, {"prompt": PROMPT, "max_new_tokens": 20, "stop": [stop, "absent"]}
    )
    assert "".join(piece["token"] for piece in pieces) == text[: text.index(stop)]
    assert done["finish_reason"] == "stop"


def test_executorchs_server_runs_the_program_with_our_worker(llama: Path, tmp_path: Path) -> None:
    client = pytest.importorskip("executorch.examples.llm_server.python.worker_client")
    program = tmp_path / "text.pte"
    checkpoint.lower_checkpoint(llama, checkpoint.TextProgram(chunk=32)).save(program)
    command = [sys.executable, "-m", "kernel_pytorch.lowering.worker"]
    command += ["--model_path", str(program), "--tokenizer_path", str(llama)]
    worker = client.spawn_worker(command)
    try:
        _over_http(worker, llama)
    finally:
        worker.close()


def _over_http(worker: object, llama: Path) -> None:
    """The server's own HTTP surface where FastAPI is installed, its client otherwise."""
    generator = kp.TextGenerator.from_pretrained(llama)
    chat = generator.chat()
    wanted = "".join(chat.stream("hello dog", max_tokens=6))
    pieces: list[str] = []
    prompt = generator.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello dog"}], add_generation_prompt=True, tokenize=False
    )
    settings = type("Settings", (), {"max_new_tokens": 6, "temperature": 0.0, "session_id": "direct"})
    worker.generate(prompt, settings, pieces.append)
    assert "".join(pieces) == wanted
    testing = pytest.importorskip("fastapi.testclient")
    from executorch.examples.llm_server.python.chat_template import ChatTemplate
    from executorch.examples.llm_server.python.server import build_app
    from executorch.examples.llm_server.python.serving_chat import ServingChat
    from executorch.examples.llm_server.python.session_runtime import SessionRuntime
    from executorch.examples.llm_server.python.tool_parsers import HermesDetector

    serving = ServingChat(
        SessionRuntime(worker), ChatTemplate(str(llama)), "tiny", tool_detector_cls=HermesDetector
    )
    http = testing.TestClient(build_app(serving, "tiny"))
    messages = [{"role": "user", "content": "hello dog"}]
    request = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0.0}
    answer = http.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == wanted
    streamed = http.post("/v1/chat/completions", json={**request, "stream": True})
    assert "data: [DONE]" in streamed.text


def test_the_worker_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernel_pytorch.lowering.worker", "--help"], capture_output=True, text=True
    )
    assert "--tokenizer_path" in done.stdout
