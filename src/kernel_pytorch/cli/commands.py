"""The commands of ``kernel-pytorch`` and their options. A command's module is imported when it runs."""

from __future__ import annotations

import json
import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def _examples(*commands: str) -> str:
    """Return an epilogue with one command per line; Typer keeps line breaks only at empty lines."""
    return "\n\n".join(
        ["Examples:" if len(commands) > 1 else "Example:", *(f"[bold]{one}[/bold]" for one in commands)]
    )


app = typer.Typer(
    name="kernel-pytorch",
    help="Fast, exact PyTorch kernels for whatever hardware is there, chosen automatically and explained.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

DeviceOption = Annotated[str | None, typer.Option(help="A torch device; the best one if omitted.")]
RecordOption = Annotated[bool, typer.Option(help="Write the result as a record; needs a clean checkout.")]
QuantizationOption = Annotated[str | None, typer.Option(help="The quantization recipe; none if omitted.")]
SinksOption = Annotated[int, typer.Option(help="With --window: first tokens that are always attended to.", min=0)]
CacheOption = Annotated[str, typer.Option(help="Dtype of cached keys and values: float32, float16 or int8.")]
LengthOption = Annotated[
    int | None, typer.Option("--context", help="Maximum number of tokens without a window; 4096 if omitted.", min=2)
]
SourceArgument = Annotated[
    str | None, typer.Argument(help="package.module:function, which returns (model, inputs).")
]


@dataclass
class Invocation:
    """State of one invocation that the commands and ``main`` share."""

    arguments: list[str]
    debug: bool = False

    @property
    def command(self) -> str:
        """The command for records, without ``--out``, which does not affect results."""
        words, skip = ["kernel-pytorch"], False
        for word in self.arguments:
            if not skip and word != "--out" and not word.startswith("--out="):
                words.append(word)
            skip = word == "--out"
        return shlex.join(words)


def _version(wanted: bool) -> None:
    if wanted:
        import kernel_pytorch

        typer.echo(kernel_pytorch.__version__)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """[bold]kernel-pytorch[/bold]: start with [bold]kernel-pytorch tour[/bold] or [bold]doctor[/bold]."""
    context.obj.debug = debug


@app.command(
    epilog=_examples(
        "kernel-pytorch doctor", "kernel-pytorch doctor --measure", "kernel-pytorch doctor --json | jq .devices"
    )
)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
    measure: Annotated[bool, typer.Option(help="Also measure bandwidth and matmul rates (seconds).")] = False,
    support: Annotated[bool, typer.Option("--support", help="Also show the test status of each kernel.")] = False,
) -> None:
    """Show this machine's devices, the kernels that would be selected, optional libraries, and broken plug-ins."""
    from kernel_pytorch.cli.doctor import diagnose, show

    report = diagnose(measure=measure)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report, support=support)


@app.command(epilog=_examples("kernel-pytorch tour --out report.html"))
def tour(
    out: Annotated[Path, typer.Option(help="Where to write the page with the charts.")] = Path("report.html"),
) -> None:
    """Show each part once on this machine: attention, optimisation, FP8, ranks, text generation."""
    from kernel_pytorch.cli.tour import run
    from kernel_pytorch.lowering.quiet import quiet_libraries, quiet_native

    with quiet_libraries(), quiet_native():
        run(out)


@app.command(
    epilog=_examples(
        "kernel-pytorch bench rms_norm",
        "kernel-pytorch bench rms_norm --case 16384x4096 --format bfloat16",
        "kernel-pytorch bench rms_norm --record",
    )
)
def bench(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="An op of the registry, such as rms_norm.")],
    case: Annotated[list[str] | None, typer.Option(help="A case by name; may be repeated.")] = None,
    number_format: Annotated[
        list[str] | None, typer.Option("--format", help="A dtype, such as bfloat16; may be repeated.")
    ] = None,
    device: DeviceOption = None,
    seconds: Annotated[float, typer.Option(help="Seconds to sample each measurement for.", min=0.01)] = 0.3,
    record: RecordOption = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the record; benchmarks/evidence by default.")] = None,
) -> None:
    """Check an op's kernels against float64, then time them and the alternatives in PyTorch and other libraries."""
    from kernel_pytorch.cli.bench import run

    run(
        op,
        cases=tuple(case or ()),
        formats=tuple(number_format or ()),
        device=device,
        seconds=seconds,
        record=record,
        out=out,
        command=context.obj.command,
    )


@app.command(
    epilog=_examples(
        "kernel-pytorch parity",
        "kernel-pytorch parity --recipe tensorwise --recipe rowwise --steps 100",
        "kernel-pytorch parity --size 100m --seeds 3 --out runs/100m",
        "kernel-pytorch parity --from runs/100m",
    )
)
def parity(
    context: typer.Context,
    size: Annotated[str, typer.Option(help="small fits a CPU, 100m needs a GPU.")] = "small",
    steps: Annotated[
        int | None, typer.Option(help="Steps of each run; the size's default if omitted.", min=2)
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each arm; a gap within their spread passes.", min=1)] = 3,
    recipe: Annotated[
        list[str] | None, typer.Option(help="An FP8 recipe, delayed if omitted; may be repeated.")
    ] = None,
    device: DeviceOption = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--eager", help="Compile the blocks; by default on a GPU only.")
    ] = None,
    record: RecordOption = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of results and report, continued if it exists; parity by default.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Do not train: report on the results in this folder.")
    ] = None,
) -> None:
    """Train a transformer in FP8 and in bf16 from the same seeds; compare losses and times in one report.

    Exits with 1 if a loss differs from bf16 beyond its seeds and beyond 0.25 %.
    """
    from kernel_pytorch.cli.parity import redraw, run

    if source is not None:
        if record:
            raise ValueError("--record with --from: a record is of runs on this machine, leave one of them out")
        summary = redraw(source, out)
    else:
        summary = run(
            size=size,
            steps=steps,
            seeds=seeds,
            recipes=tuple(recipe or ("delayed",)),
            device=device,
            compiled=compiled,
            record=record,
            out=out or Path("parity"),
            command=context.obj.command,
        )
    if not summary.passes:
        raise typer.Exit(1)


@app.command(
    "lower",
    epilog=_examples(
        "kernel-pytorch lower my_package.models:small --out small.pte",
        "kernel-pytorch lower models:small --out small.pte --recipe int8-dynamic",
        "kernel-pytorch lower --hf checkpoints/SmolLM2-135M --out smol.pte",
    ),
)
def lower_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="The .pte to write, or the .pt2 for AOTInductor.")],
    source: SourceArgument = None,
    folder: Annotated[
        Path | None, typer.Option("--hf", help="A Hugging Face checkpoint folder, instead of a function.")
    ] = None,
    backend: Annotated[str, typer.Option(help="The backend that will run it.")] = "cpu",
    recipe: QuantizationOption = None,
    window: Annotated[
        int | None, typer.Option(help="With --hf: attend this far back, in constant memory.", min=1)
    ] = None,
    sinks: SinksOption = 0,
    cache_dtype: CacheOption = "float32",
    length: LengthOption = None,
) -> None:
    """Lower a model to a .pte or a .pt2, report what runs each node, and compare the results with eager PyTorch."""
    from kernel_pytorch.cli.lower import lower, lower_folder

    if (source is None) == (folder is None):
        raise ValueError("give package.module:function or --hf FOLDER, one of them")
    if folder is not None:
        how = {"recipe": recipe, "window": window, "sinks": sinks, "cache_dtype": cache_dtype, "context": length}
        lower_folder(folder, out, how, debug=context.obj.debug)
    else:
        lower(str(source), out, backend, recipe, debug=context.obj.debug)


@app.command(
    "generate",
    epilog=_examples(
        "kernel-pytorch generate checkpoints/SmolLM2-135M --prompt 'Once upon a time'",
        "kernel-pytorch generate Qwen3-0.6B --chat --recipe int4-weight --window 4096",
    ),
)
def generate_command(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(help="A Hugging Face checkpoint folder: config, safetensors, tokenizer.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation with the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of an answer.", min=1)] = 256,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 takes the most likely token.", min=0)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    recipe: QuantizationOption = None,
    window: Annotated[int | None, typer.Option(help="Attend this far back, in constant memory.", min=1)] = None,
    sinks: SinksOption = 0,
    cache_dtype: CacheOption = "float32",
    length: LengthOption = None,
    session: Annotated[
        Path | None, typer.Option(help="Continue from this file if it exists, and write it at the end.")
    ] = None,
) -> None:
    """Generate text with a Hugging Face checkpoint: lowered once, then loaded from the cache."""
    from kernel_pytorch.cli.generate import generate

    generate(
        folder,
        prompt=prompt,
        chat=chat,
        max_tokens=max_tokens,
        sampling=(temperature, top_p, seed),
        program={
            "recipe": recipe,
            "window": window,
            "sinks": sinks,
            "cache_dtype": cache_dtype,
            "context": length,
        },
        session=session,
        debug=context.obj.debug,
    )


@app.command(
    "optimize",
    epilog=_examples(
        "kernel-pytorch optimize my_package.models:small --plan plan.json",
        "kernel-pytorch optimize --hf ./checkpoint --goal training --budget 10m",
    ),
)
def optimize_command(
    source: SourceArgument = None,
    hugging_face: Annotated[
        Path | None, typer.Option("--hf", help="A Hugging Face checkpoint folder, or one with a config.json only.")
    ] = None,
    goal: Annotated[str, typer.Option(help="latency, throughput, training or memory.")] = "latency",
    budget: Annotated[
        str, typer.Option(help="Time to spend, such as 90s or 5m; Ctrl-C keeps the best so far.")
    ] = "5m",
    budget_db: Annotated[
        float | None, typer.Option("--budget-db", help="Signal-to-noise ratio that approximate steps must keep.")
    ] = None,
    include: Annotated[list[str] | None, typer.Option(help="The only candidate to try; may be repeated.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="A candidate to leave out; may be repeated.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Write the plan here, for kp.apply.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report here, as a page of HTML.")] = None,
    batch: Annotated[int, typer.Option(help="With --hf: sequences in a batch.", min=1)] = 1,
    length: Annotated[
        list[int] | None,
        typer.Option(help="With --hf: tokens of a sequence, 128 if omitted; may be repeated.", min=1),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With --hf: float32 or bfloat16; the checkpoint's if omitted.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="With --hf: a torch device; cpu if omitted.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue an earlier run.")] = True,
    fail_if_slower: Annotated[
        bool, typer.Option("--fail-if-slower", help="Exit with status 1 if the result is slower than a baseline.")
    ] = False,
) -> None:
    """Make a model fast, prove that it computes the same, and write the plan.

    A candidate that is not faster on every input is refused, with its reason.
    """
    from kernel_pytorch.cli.optimize import Source, optimize

    given = Source(source, hugging_face, batch, tuple(length or (128,)), dtype, device)
    gain = optimize(
        given,
        goal,
        budget,
        tuple(include) if include else None,
        tuple(exclude or ()),
        plan,
        report,
        budget_db=budget_db,
        resume=resume,
    )
    if fail_if_slower and gain < 1:
        raise typer.Exit(1)


@app.command(
    "run",
    epilog=_examples("kernel-pytorch run small.pte", "kernel-pytorch run small.pte --input x.pt --repeat 20"),
)
def run_command(
    program: Annotated[Path, typer.Argument(help="A .pte file.")],
    given: Annotated[
        list[Path] | None, typer.Option("--input", help="A tensor saved with torch.save; ones if omitted.")
    ] = None,
    method: Annotated[str, typer.Option(help="The method to run.")] = "forward",
    repeat: Annotated[int, typer.Option(help="Number of runs.", min=1)] = 1,
) -> None:
    """Run a .pte on ExecuTorch's runtime with our delegate, and print its outputs and time."""
    from kernel_pytorch.cli.run import run

    run(program, tuple(given or ()), method, repeat)


@app.command(
    "build-runtime",
    epilog=_examples("kernel-pytorch build-runtime", "kernel-pytorch build-runtime --backend acme"),
)
def build_runtime_command(
    backend: Annotated[str, typer.Option(help="The backend of the runtime, as in lower --backend.")] = "cpu",
    path: Annotated[bool, typer.Option("--path", help="Print its folder and nothing else, for scripts.")] = False,
) -> None:
    """Build the C++ runtime for .pte files. Without this command it is built at first use."""
    from kernel_pytorch.cli.build_runtime import build_runtime

    build_runtime(backend, only_path=path)


backend_app = typer.Typer(
    help="Backends of your own: create one, document it, check its documentation.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(backend_app, name="backend")


@backend_app.command(
    "new",
    epilog=_examples("kernel-pytorch backend new acme", "kernel-pytorch backend new acme --out ~/src/acme-backend"),
)
def backend_new(
    name: Annotated[str, typer.Argument(help="The backend's name: one lower-case word.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to create; ./NAME-backend if omitted. It must not exist.")
    ] = None,
) -> None:
    """Create a project for a backend of your own, with C++ delegate, quantizer, tests, documentation and CI."""
    from kernel_pytorch.cli.backend import new

    new(name, out)


@backend_app.command(
    "docs",
    epilog=_examples(
        "kernel-pytorch backend docs cpu --out docs/backends/cpu",
        "kernel-pytorch backend docs acme --out docs --probe",
    ),
)
def backend_docs(
    name: Annotated[str, typer.Argument(help="A backend that is installed.")],
    out: Annotated[Path, typer.Option(help="Folder of the pages; other files in it are not touched.")],
    probe: Annotated[
        bool, typer.Option("--probe", help="First lower and run every operator again (minutes).")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with status 1 if a page is out of date.")
    ] = False,
) -> None:
    """Render a backend's pages from its records, with the same pages and sections for every backend."""
    from kernel_pytorch.cli.backend import docs

    if not docs(name, out, probe=probe, only_check=check):
        raise typer.Exit(1)


@backend_app.command(
    "check",
    epilog=_examples(
        "kernel-pytorch backend check docs/backends/cpu", "kernel-pytorch backend check path/to/docs --json"
    ),
)
def backend_check(
    folder: Annotated[Path, typer.Argument(help="A folder with the documentation of any backend.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
) -> None:
    """Check any backend's documentation: pages, sections, Python blocks, links and the table of operators.

    Exits with 1 if anything required is missing, empty, a template's or broken.
    """
    from kernel_pytorch.cli.backend import check

    if not check(folder, as_json=as_json, strict=strict):
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; errors are printed as one line, with a traceback only with ``--debug``."""
    invocation = Invocation(sys.argv[1:] if arguments is None else arguments)
    try:
        return app(args=invocation.arguments, obj=invocation)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
    except Exception as error:
        if invocation.debug:
            traceback.print_exc()
        else:
            text = " ".join(str(error).split()) or type(error).__name__
            typer.secho(f"kernel-pytorch: {text} (kernel-pytorch --debug shows the traceback)", fg="red", err=True)
        sys.exit(1)
