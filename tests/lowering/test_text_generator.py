"""kp.TextGenerator: the tokens of Hugging Face's own generation, chats, windows, cached programs, the commands."""

import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

import kernel_pytorch as kp
from kernel_pytorch.cli import main
from kernel_pytorch.cli.generate import _converse
from kernel_pytorch.lowering import Sampling, checkpoint
from kernel_pytorch.lowering.build import build
from kernel_pytorch.lowering.runtime import registered
from kernel_pytorch.lowering.text_generator import _Detokenizer
from kernel_pytorch.testing.checkpoints import tiny_checkpoint

PROMPT = "once upon a time there was a lazy dog that kept the memory of a conversation"


PROGRAMS = Path(os.environ["KERNEL_PYTORCH_PROGRAMS"])  # the run's own, set by conftest.py


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"))


def wanted(folder: Path, prompt: str, count: int) -> tuple[int, ...]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=count, do_sample=False)
    return tuple(found[0, given["input_ids"].shape[1] :].tolist())


def test_tokens_are_those_of_transformers(llama: Path) -> None:
    generator = kp.TextGenerator.from_pretrained(llama)
    found = generator.generate(PROMPT, max_tokens=40)
    assert found.tokens == wanted(llama, PROMPT, 40)
    assert len(set(found.tokens)) > 10  # no model that repeats one token
    assert found.text == generator.tokenizer.decode(found.tokens, skip_special_tokens=True)
    assert found.text == "".join(generator.stream(PROMPT, max_tokens=40))
    assert generator.last.reused_tokens == found.prompt_tokens - 1
    longer = PROMPT * 9  # more than a chunk
    assert len(generator.tokenizer(longer)["input_ids"]) > generator.chunk
    assert generator.generate(longer, max_tokens=8).tokens == wanted(llama, longer, 8)


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", {}), ("gemma3_text", {"sliding_window": 6})])
def test_other_models(kind: str, sizes: dict[str, int], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / kind, kind, **sizes)
    found = kp.TextGenerator.from_pretrained(folder).generate(PROMPT, max_tokens=24)
    assert found.tokens == wanted(folder, PROMPT, len(found.tokens))


def test_a_program_is_lowered_once_for_each_content(llama: Path) -> None:
    steps: list[str] = []
    kp.TextGenerator.from_pretrained(llama)
    kp.TextGenerator.from_pretrained(llama, tell=steps.append)
    assert steps == ["looking for a lowered program", "loading the program"]
    plain = checkpoint.TextProgram()
    digest = checkpoint.content_digest(llama, plain, PROGRAMS)
    assert digest == checkpoint.content_digest(llama, plain, PROGRAMS)
    assert digest != checkpoint.content_digest(llama, checkpoint.TextProgram(window=8), PROGRAMS)
    config = llama / "config.json"
    before = config.read_text()
    config.write_text(before + " ")
    assert digest != checkpoint.content_digest(llama, plain, PROGRAMS)
    config.write_text(before)


def test_a_chat_reuses_the_cache_and_can_be_taken_back(llama: Path) -> None:
    generator = kp.TextGenerator.from_pretrained(llama)
    chat = generator.chat()
    first = "".join(chat.stream("hello dog", max_tokens=6))
    assert generator.last.reused_tokens == 0
    second = "".join(chat.stream("says the fox", max_tokens=6))
    assert generator.last.reused_tokens > 6
    chat.rewind()
    assert [message["content"] for message in chat.messages] == ["hello dog", first]
    assert "".join(chat.stream("says the fox", max_tokens=6)) == second
    chat.reset()
    assert "".join(chat.stream("hello dog", max_tokens=6)) == first


@pytest.mark.parametrize("how", [{}, {"window": 8, "sinks": 2, "cache_dtype": "int8"}], ids=["whole", "window"])
def test_a_session_goes_on_where_it_was_saved(llama: Path, tmp_path: Path, how: dict) -> None:
    first = kp.TextGenerator.from_pretrained(llama, **how)
    before = first.generate(PROMPT * 2, max_tokens=8)
    first.save_session(tmp_path / "session")
    ids = [*first.tokenizer(PROMPT * 2)["input_ids"], *before.tokens, *first.tokenizer("says the fox")["input_ids"]]
    list(first.stream_tokens(ids, max_tokens=8))
    second = kp.TextGenerator.from_pretrained(llama, **how)
    second.load_session(tmp_path / "session")
    list(second.stream_tokens(ids, max_tokens=8))
    assert second.last.tokens == first.last.tokens
    assert second.last.reused_tokens == first.last.reused_tokens > before.prompt_tokens
    fresh = kp.TextGenerator.from_pretrained(llama, **how)
    list(fresh.stream_tokens(ids, max_tokens=8))
    assert fresh.last.tokens == second.last.tokens
    assert fresh.last.reused_tokens == 0


def test_a_session_that_does_not_fit_is_refused_and_changes_nothing(llama: Path, tmp_path: Path) -> None:
    generator = kp.TextGenerator.from_pretrained(llama)
    wanted_text = generator.generate(PROMPT, max_tokens=6).text
    path = tmp_path / "session"
    generator.save_session(path)
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises(ValueError, match="its checksum is wrong"):
        generator.load_session(path)
    path.write_bytes(b"no session")
    with pytest.raises(ValueError, match="it is no session that save_session wrote"):
        generator.load_session(path)
    path.write_bytes(data)
    other = kp.TextGenerator.from_pretrained(llama, window=8, sinks=2, cache_dtype="int8")
    with pytest.raises(ValueError, match="is a session of another program"):
        other.load_session(path)
    with pytest.raises(ValueError, match="the session is of a cache with another shape"):
        other._program.restore(generator._program.history())
    with pytest.raises(ValueError, match=r"the session ends before its history|the session is cut"):
        generator._program.restore(generator._program.history()[:-1])
    with pytest.raises(ValueError, match="has 3 bytes more than the caches"):
        generator._program.restore(generator._program.history() + b"end")
    assert generator.generate(PROMPT, max_tokens=6).text == wanted_text


def test_the_context_is_an_end(llama: Path) -> None:
    generator = kp.TextGenerator.from_pretrained(llama)
    assert generator.context == 512
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens and the context 512: shorten it, or give a"):
        generator.generate(PROMPT * 40)
    ids = (generator.tokenizer(PROMPT)["input_ids"] * 40)[:510]
    list(generator.stream_tokens(ids, max_tokens=9))
    assert generator.last.stopped == "context"
    assert len(generator.last.tokens) == 3


def test_a_window_goes_on_beyond_any_context(llama: Path) -> None:
    generator = kp.TextGenerator.from_pretrained(llama, window=8, sinks=2, cache_dtype="int8")
    ids = generator.tokenizer(PROMPT)["input_ids"] * 40
    assert len(ids) > 512
    again = []
    for _ in range(2):  # the ring has wrapped around: the second begins anew
        list(generator.stream_tokens(ids, max_tokens=5))
        again.append(generator.last.tokens)
        assert generator.last.reused_tokens == 0 or len(again) == 2
    assert again[0] == again[1]


def test_sampling_is_repeatable(llama: Path) -> None:
    generator = kp.TextGenerator.from_pretrained(llama)
    warm = [
        generator.generate(PROMPT, max_tokens=12, sampling=Sampling(2.0, 0.9, seed)).tokens for seed in (1, 1, 2)
    ]
    assert warm[0] == warm[1] != warm[2]
    with pytest.raises(ValueError, match=r"top_p=0: use a number above 0"):
        Sampling(1.0, 0)


def test_the_command_line(llama: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as done:
        main(["generate", str(llama), "--prompt", PROMPT, "--max-tokens", "8"])
    assert not done.value.code
    said = capsys.readouterr()
    generator = kp.TextGenerator.from_pretrained(llama)
    assert said.out == generator.generate(PROMPT, max_tokens=8).text + "\n"
    assert "8 tokens at" in said.err
    monkeypatch.setattr("sys.stdin", io.StringIO("hello dog\n/rewind\n/reset\nhello dog\n"))
    with pytest.raises(SystemExit):
        main(["generate", str(llama), "--chat", "--max-tokens", "4"])
    answers = capsys.readouterr().out
    half = len(answers) // 2
    assert answers[:half] == answers[half:]
    out = tmp_path / "llama.pte"
    with pytest.raises(SystemExit) as done:
        main(["lower", "--hf", str(llama), "--out", str(out)])
    assert not done.value.code
    assert (tmp_path / "tokenizer.json").is_file()
    found = kp.TextGenerator(out, generator.tokenizer).generate(PROMPT, max_tokens=8)
    assert found.tokens == generator.generate(PROMPT, max_tokens=8).tokens


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config.json: pass a Hugging Face checkpoint folder"):
        kp.TextGenerator.from_pretrained(tmp_path)


def test_a_folder_with_missing_or_damaged_files(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(llama, folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer that can be read: copy its files there"):
        kp.TextGenerator.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json' is no JSON object .*: download the checkpoint again"):
        kp.TextGenerator.from_pretrained(folder)


def test_prompts_that_are_refused(llama: Path) -> None:
    generator = kp.TextGenerator.from_pretrained(llama)
    with pytest.raises(TypeError, match="prompt is a list: pass one text"):
        generator.generate(["a", "b"])
    for token in (-1, 10**6):
        with pytest.raises(
            ValueError, match=rf"token {token} is not in the vocabulary of the model, 0 to \d+: use"
        ):
            list(generator.stream_tokens([5, token]))
    with pytest.raises(ValueError, match="temperature=nan: use 0 for greedy"):
        Sampling(temperature=float("nan"))


def test_a_place_that_cannot_be_written_is_found_first(llama: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["lower", "--hf", str(llama), "--out", str(tmp_path / "missing" / "x.pte")])
    assert "there is no folder" in capsys.readouterr().err


def test_executorch_runs_the_program_with_its_own_runner(llama: Path, tmp_path: Path) -> None:
    runner = pytest.importorskip("executorch.extension.llm.runner")
    out = tmp_path / "llama.pte"
    shutil.copy(checkpoint.cached_program(llama, checkpoint.TextProgram()), out)
    registered()  # our delegate; the rest is ExecuTorch's, the tokenizer too
    pieces: list[str] = []
    config = runner.GenerationConfig(max_new_tokens=16, temperature=0.0, echo=False)
    runner.TextLLMRunner(str(out), str(llama / "tokenizer.json")).generate(PROMPT, config, pieces.append)
    wanted = kp.TextGenerator.from_pretrained(llama).generate(PROMPT, max_tokens=16).text
    assert "".join(pieces) == wanted


def run_ids(program: Path, ids: list[int], *options: str) -> subprocess.CompletedProcess:
    command = [build().runner, str(program), "--generate", *options]
    return subprocess.run(command, input=" ".join(map(str, ids)), capture_output=True, text=True)


def test_the_runner_generates_from_token_ids_without_python(llama: Path) -> None:
    program = checkpoint.cached_program(llama, checkpoint.TextProgram())
    generator = kp.TextGenerator.from_pretrained(llama)
    ids = generator.tokenizer(PROMPT * 9)["input_ids"]
    assert len(ids) > generator.chunk
    done = run_ids(program, ids, "12")
    assert done.returncode == 0, done.stderr
    list(generator.stream_tokens(ids, max_tokens=12))
    assert tuple(map(int, done.stdout.split())) == generator.last.tokens
    assert "12 tokens at" in done.stderr
    sampled = [run_ids(program, ids[:9], "12", "--temperature", "2", "--seed", seed).stdout for seed in "112"]
    assert sampled[0] == sampled[1] != sampled[2]
    assert "the prompt has 600 tokens and the context 512" in run_ids(program, [5] * 600, "3").stderr
    assert "no token ids" in run_ids(program, [], "3").stderr


@pytest.mark.skipif(
    not os.environ.get("KERNEL_PYTORCH_TOKENIZERS"),
    reason="KERNEL_PYTORCH_TOKENIZERS names no sources of pytorch-tokenizers",
)
def test_the_runner_takes_and_gives_text(llama: Path, tmp_path: Path) -> None:
    program = tmp_path / "text.pte"
    shutil.copy(checkpoint.cached_program(llama, checkpoint.TextProgram()), program)
    shutil.copy(llama / "tokenizer.json", tmp_path)
    generator = kp.TextGenerator.from_pretrained(llama)
    command = [build().runner, str(program), "--generate", "20"]
    for prompt in (PROMPT, "the  quick brown fox, and the dog", "a window keeps"):
        done = subprocess.run([*command, "--prompt", prompt], capture_output=True, text=True)
        assert done.stdout == generator.generate(prompt, max_tokens=20).text + "\n", done.stderr
    sampled = [
        subprocess.run([*command, "--prompt", PROMPT, "--temperature", "2", "--top-p", top], capture_output=True)
        for top in ("0.9", "0.9", "0.000001")
    ]
    assert sampled[0].stdout == sampled[1].stdout
    assert sampled[2].stdout.decode() == generator.generate(PROMPT, max_tokens=20).text + "\n"
    unknown = subprocess.run([*command, "--prompt", "12!"], capture_output=True, text=True)
    assert "the tokenizer cannot encode the prompt" in unknown.stderr  # it has no token for a digit
    (tmp_path / "tokenizer.json").unlink()
    missing = subprocess.run([*command, "--prompt", PROMPT], capture_output=True, text=True)
    assert "tokenizer.json is no tokenizer.json that can be read" in missing.stderr


@pytest.mark.skipif(bool(os.environ.get("KERNEL_PYTORCH_TOKENIZERS")), reason="the runner has a tokenizer")
def test_a_runner_without_a_tokenizer_says_how_to_get_one(llama: Path) -> None:
    program = checkpoint.cached_program(llama, checkpoint.TextProgram())
    command = [build().runner, str(program), "--generate", "2", "--prompt", "hello"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "set KERNEL_PYTORCH_TOKENIZERS" in done.stderr


def test_a_prefix_of_the_tokenizer_is_in_the_program(llama: Path, tmp_path: Path) -> None:
    from tokenizers import processors

    folder = tmp_path / "prefixed"
    shutil.copytree(llama, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    begin = ("<|begin|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[begin]
    )
    tokenizer.save_pretrained(folder)
    assert checkpoint._prompt_prefix(folder) == [tokenizer.bos_token_id]
    assert checkpoint._prompt_prefix(llama) == []


def test_a_context_of_its_own(llama: Path) -> None:
    assert kp.TextGenerator.from_pretrained(llama, context=64).context == 64
    with pytest.raises(ValueError, match="context=600: the model has 512 positions; give a window instead"):
        kp.TextGenerator.from_pretrained(llama, context=600)
    with pytest.raises(ValueError, match="context=64, window=8: give one of them"):
        checkpoint.TextProgram(context=64, window=8)


def test_a_session_of_a_chat_is_kept_on_the_command_line(
    llama: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(text: str, *options: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        with pytest.raises(SystemExit) as done:
            main(["generate", str(llama), "--chat", "--max-tokens", "4", *options])
        assert not done.value.code
        return capsys.readouterr().out

    whole = said("hello dog\nsays the fox\n")
    session = str(tmp_path / "session")
    assert said("hello dog\n", "--session", session) + said("says the fox\n", "--session", session) == whole


def test_a_chat_goes_on_after_an_answer_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def answer(said: str) -> None:
        found.append(said)
        if said == "stop":
            raise KeyboardInterrupt
        if said == "long":
            raise ValueError("the prompt has 9 tokens and the context 8")

    monkeypatch.setattr("sys.stdin", io.StringIO("stop\nlong\n/rest\nhello\n"))
    _converse(None, answer, found.append)
    assert found[:2] == ["stop", "\nstopped"]
    assert found[2:4] == ["long", "the prompt has 9 tokens and the context 8; /rewind and /reset make room"]
    assert found[4].startswith("/rest is no command: ")
    assert found[5:] == ["hello"]


def test_an_answer_that_is_interrupted_is_part_of_the_conversation(llama: Path) -> None:
    chat = kp.TextGenerator.from_pretrained(llama).chat()
    answer = chat.stream("hello", max_tokens=8)
    heard = next(answer)
    answer.close()
    assert chat.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": heard}]


def test_a_session_that_cannot_be_written_is_found_first(llama: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["generate", str(llama), "--prompt", "hello", "--session", str(tmp_path / "missing" / "x")])
    said = capsys.readouterr()
    assert "session=" in said.err
    assert "there is no folder" in said.err
    assert said.out == ""


def test_a_character_of_several_tokens_is_held_back() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    text = "añ 猫!"
    detokenizer = _Detokenizer(tokenizer)
    assert [detokenizer.add(token) for token in tokenizer(text)["input_ids"]] == [
        *("a", "", "ñ", " ", "", "", "猫", "!"),
    ]
    assert detokenizer.finish() == ""
    assert detokenizer.add(tokenizer("é")["input_ids"][0]) == ""
    assert detokenizer.finish() == "�"
