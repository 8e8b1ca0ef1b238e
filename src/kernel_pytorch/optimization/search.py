"""Search for the best combination of candidates; each step is verified, then timed beside the previous one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from kernel_pytorch.optimization.candidate import Candidate, Context, Sites, Stage
from kernel_pytorch.optimization.combinations import COMPILE, EAGER, State, SwitchedModel
from kernel_pytorch.optimization.compiler import compilations
from kernel_pytorch.optimization.examples import Example
from kernel_pytorch.optimization.fallbacks import recorded
from kernel_pytorch.optimization.results import Progress, Result
from kernel_pytorch.optimization.timing import (
    TOO_NOISY,
    UNSTEADY,
    Arm,
    Comparison,
    Timer,
    compared,
    noise_of,
    saved_bytes,
    unsteady,
)
from kernel_pytorch.optimization.trials import Trial, TrialCache
from kernel_pytorch.optimization.verify import Verdict, Verifier
from kernel_pytorch.optimization.workload import Workload

__all__ = ["Search"]

_CALLS = 4  # a compiled model stops compiling within this many calls of one shape
_LOST_DB = 1.0  # other orders of rounding change the ratio by less


class Search:
    """One search over the candidates that match a model."""

    def __init__(
        self,
        workload: Workload,
        context: Context,
        verifier: Verifier,
        matched: Mapping[Candidate, Sites] | Sequence[tuple[Candidate, Sites]],
        *,
        timer: Timer,
        budget: float,
        cache: TrialCache,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        pairs = list(matched.items()) if isinstance(matched, Mapping) else list(matched)
        self._candidates = {candidate.name: candidate for candidate, _ in pairs}
        steps = {candidate.name: (candidate, sites.names) for candidate, sites in pairs}
        self._model = SwitchedModel(workload.model, steps)
        self._workload, self._context, self._verifier = workload, context, verifier
        self._timer, self._cache, self._progress = timer, cache, progress
        self._deadline = time.monotonic() + budget
        self._sample = min(1.0, max(0.02, budget / 300))
        self._took = {False: 0.0, True: 0.0}  # seconds of the last trial, without and with torch.compile
        self._gain: dict[State, float] = {EAGER: 1.0}  # minimum speed-up over eager: the product over the steps
        self._verdicts: dict[State, Verdict] = {}
        self.result = Result()

    def run(self) -> Result:
        """Search until everything was tried, the budget is spent or the user interrupts; return the best result."""
        result = self.result
        try:
            if not self._measure_noise():
                return result
            self._find()
        except KeyboardInterrupt:
            self._note("interrupted: this is the best combination found until then")
        try:
            self._confirm()
        except KeyboardInterrupt:  # a second Ctrl-C: every step of the best was verified, but is not timed again
            self._note("interrupted again: the best combination was not timed beside eager mode")
        finally:
            self._model.switch(EAGER)
        return result

    # The order of the search.

    def _find(self) -> None:
        result = self.result
        rewrites = [name for name, one in self._candidates.items() if one.stage is not Stage.COMPILE]
        compilers = [name for name, one in self._candidates.items() if one.stage is Stage.COMPILE]
        self._total = len(rewrites) + len(compilers) * 2
        compiled = self._single(COMPILE) if "compile" in compilers else None
        singles = [self._single((name,)) for name in rewrites]
        useful = [trial for trial in singles if trial is not None and trial.kept]
        path: list[Trial] = []
        for single in sorted(useful, key=lambda trial: -trial.speedup):
            base = path[-1].state if path else EAGER
            state = self._extended(base, single.state[0])
            trial = single if base == EAGER else self._attempt(base, state) if state else None
            if trial is not None and trial.kept:
                path.append(trial)
        rewritten = path[-1].state if path else EAGER
        if compiled is None or not compiled.kept or self._gain[COMPILE] <= self._gain[rewritten]:
            self._choose(path)
        else:
            self._choose([compiled])
        # Some steps gain under torch.compile only: attention without the mask tensor that transformers builds there.
        hopeful = rewritten
        for tried in singles:
            if tried is not None and tried.correct and not tried.kept and self._neutral(tried):
                hopeful = self._extended(hopeful, tried.state[0]) or hopeful
        for name in compilers:
            for start in dict.fromkeys((hopeful, rewritten)):
                state = self._extended(start, name)
                trial = self._attempt(result.best, state) if start or name != "compile" else None
                if trial is not None and trial.kept:
                    self._choose([*result.steps, trial])
                    break
        self._refine(rewrites)

    def _single(self, state: State) -> Trial | None:
        """Try one candidate by itself; remember the best of them, in case of an interrupt."""
        trial = self._attempt(EAGER, state)
        if trial is not None and trial.kept and self._gain[state] > self._gain[self.result.best]:
            self._choose([trial])
        return trial

    def _neutral(self, trial: Trial) -> bool:
        """Return whether an exact candidate does not lose more than the noise."""
        exact = self._exact(trial.state)
        return exact and bool(trial.ratios) and max(trial.ratios) <= 1 + self.result.noise

    def _refine(self, rewrites: Sequence[str]) -> None:
        """Remove, add and exchange steps of a compiled combination, because other steps gain than in eager mode."""
        result = self.result
        if not self._compiled(result.best):
            return
        for name in list(result.best[:-1]) if len(result.best) > 2 else ():
            trial = self._attempt(result.best, tuple(other for other in result.best if other != name))
            if trial is not None and trial.kept:
                self._choose([*result.steps, trial])
        for name in rewrites:
            state = self._extended(result.best, name) or self._swapped(result.best, name)
            if state and any(trial.state == (name,) and trial.correct for trial in result.trials):
                trial = self._attempt(result.best, state)
                if trial is not None and trial.kept:
                    self._choose([*result.steps, trial])

    def _choose(self, path: list[Trial]) -> None:
        if path:
            self.result.best, self.result.steps = path[-1].state, path

    def _extended(self, state: State, name: str) -> State | None:
        """Return the state with one more candidate, or None if it is in the state or excluded by it."""
        if name in state or any(self._candidates[name].excludes(self._candidates[other]) for other in state):
            return None
        return tuple(sorted((*state, name), key=lambda one: self._candidates[one].stage))

    def _swapped(self, state: State, name: str) -> State | None:
        """Return the state with a candidate instead of those that it excludes, or None if there are none."""
        new = self._candidates[name]
        kept = tuple(other for other in state if not new.excludes(self._candidates[other]))
        return None if name in state or kept == state else self._extended(kept, name)

    # One step: build, verify, measure.

    def _attempt(self, base: State, state: State | None) -> Trial | None:
        """Try a combination in comparison with another one; return None if no time is left."""
        if state is None or state == base:
            return None
        trial = self._cache.get(base, state, self.result.noise)
        if trial is None:
            compiled = self._compiled(state)
            started = time.monotonic()
            # Do not start a trial with less than half of its expected time left: compilations take long.
            if started + self._took[compiled] / 2 > self._deadline:
                self._note("the budget ran out before everything was tried")
                return None
            self._tell(" + ".join(state))
            trial = self._tried(base, state)
            self._took[compiled] = time.monotonic() - started
            self._cache.add(trial)
        if not trial.kept and state != COMPILE:
            self._model.forget(state)
        self.result.trials.append(trial)
        if trial.ratios:
            self._gain[state] = self._gain.get(base, 1.0) * trial.speedup
        return trial

    def _tried(self, base: State, state: State) -> Trial:
        with recorded() as fallbacks:
            trial = self._outcome(base, state)
        return msgspec.structs.replace(trial, fallbacks=tuple(fallbacks))

    def _outcome(self, base: State, state: State) -> Trial:
        started = compilations()
        try:
            self._model.switch(state)
            reason = self._recompiles(state)  # before verification, which compiles for every shape
            verdict = self._as_right_as(base, state)
            if not verdict.ok:
                culprit = self._bisected(base, state)
                return Trial(base, state, f"{verdict.reason}{culprit}", error=_finite(verdict.error))
            ratios = () if reason else self._measured(base, state)
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            return Trial(base, state, f"{type(error).__name__}: {text}")
        finally:
            self._model.switch(EAGER)
        counts = compilations() - started
        return Trial(
            base,
            state,
            reason or self._loses(ratios, smaller=len(state) < len(base)),
            correct=not reason,
            ratios=ratios,
            error=_finite(verdict.error) if self._exact(state) else None,
            snr_db=_finite(verdict.snr_db),
            graphs=counts.graphs,
            breaks=counts.breaks,
            noise=self.result.noise if ratios and self._context.goal != "memory" else 0.0,
        )

    def _verified(self, state: State) -> Verdict:
        self._model.switch(state)
        used = [self._candidates[name] for name in state]
        verdict = self._verifier.verify(
            exact=self._exact(state),
            drops=frozenset().union(*(candidate.drops for candidate in used)),
            adds_state=frozenset().union(*(candidate.adds_state for candidate in used)),
        )
        self._verdicts[state] = verdict
        return verdict

    def _as_right_as(self, base: State, state: State) -> Verdict:
        """Verify a combination; an exact step must also keep the signal-to-noise ratio of an approximate base."""
        verdict = self._verified(state)
        exact = all(self._candidates[name].exact for name in state if name not in base)
        if not verdict.ok or self._exact(state) or not exact or self._exact(base) or len(state) < len(base):
            return verdict
        before = self._verdicts[base] if base in self._verdicts else self._verified(base)
        self._model.switch(state)
        if verdict.snr_db >= before.snr_db - _LOST_DB:
            return verdict
        return replace(
            verdict,
            reason=f"{verdict.worst} has {verdict.snr_db:.1f} dB, and {before.snr_db:.1f} dB before an exact step",
        )

    def _compiled(self, state: State) -> bool:
        return any(self._candidates[name].stage is Stage.COMPILE for name in state)

    def _exact(self, state: State) -> bool:
        return all(self._candidates[name].exact for name in state)

    def _bisected(self, base: State, state: State) -> str:
        """Return which candidates are wrong only in combination, as the end of a reason; empty if unknown."""
        added = [name for name in state if name not in base]
        if len(state) < 2 or len(added) != 1:
            return ""
        self._model.forget(state)
        new = added[0]
        if not self._correct((new,)):
            return ""
        for name in (one for one in base if one in state):
            pair = tuple(sorted((name, new), key=lambda one: self._candidates[one].stage))
            if len(state) == 2 or not self._correct(pair):
                return f"; {name} and {new} are wrong together, and right one without the other"
        return f"; {new} is wrong only together with all of {', '.join(base)}"

    def _correct(self, state: State) -> bool:
        try:
            return self._verified(state).ok
        except Exception:
            return False
        finally:
            self._model.switch(EAGER)
            self._model.forget(state)

    def _recompiles(self, state: State) -> str:
        """Return the reason if a compiled combination recompiles for each call or each input shape; else empty."""
        if not self._compiled(state):
            return ""
        shapes = {example.signature: example for example in self._context.examples}
        self._model.switch(state)
        compiled = 0
        for number, example in enumerate(shapes.values()):
            graphs = [self._graphs_of(example) for _ in range(_CALLS)]
            if graphs[-1]:
                return f"compiles anew for each call on input {example.label}"
            # The first shape is compiled with static sizes, the second with dynamic ones, which should fit the rest.
            compiled += number >= 2 and graphs[0] > 0
        return f"compiles anew for {compiled} of {len(shapes)} input shapes" if compiled else ""

    def _graphs_of(self, example: Example) -> int:
        before = compilations()
        with self._workload.kept():
            self._workload.step(example)
        return (compilations() - before).graphs

    def _measured(self, base: State, state: State) -> tuple[float, ...]:
        if self._context.goal == "memory":
            return tuple(after / max(before, 1) for before, after in self._memory(base, state))
        return tuple(comparison.cautious for comparison in self._timed(base, state))

    def _timed(self, base: State, state: State) -> list[Comparison]:
        found = []
        with self._workload.kept():
            for example in self._context.examples:
                arms = [self._arm(base, example), self._arm(state, example)]
                found.append(compared(*self._timer(arms, self._context.device, self._sample)))
        return found

    def _memory(self, base: State, state: State) -> list[tuple[int, int]]:
        found = []
        with self._workload.kept():
            for example in self._context.examples:
                pair = []
                for one in (base, state):
                    self._model.switch(one)
                    self._workload.step(example)
                    run = lambda example=example: self._workload.step(example)  # noqa: E731
                    pair.append(saved_bytes(run, self._context.device) - self._verifier.held_bytes)
                found.append((pair[0], pair[1]))
        return found

    def _arm(self, state: State, example: Example) -> Arm:
        name = " + ".join(state) or "eager"
        return Arm(name, lambda: self._model.switch(state), lambda: self._workload.step(example))

    def _loses(self, ratios: Sequence[float], *, smaller: bool) -> str:
        """Return why a measured combination is not kept, or empty. A smaller one is kept if it is not slower."""
        noise = 0.01 if self._context.goal == "memory" else self.result.noise
        labels = [example.label for example in self._context.examples]
        worst = max(range(len(ratios)), key=lambda number: ratios[number])
        quantity = "memory" if self._context.goal == "memory" else "time"
        if smaller and ratios[worst] <= 1:
            return ""
        if ratios[worst] > 1 + noise:
            return f"takes {ratios[worst]:.2f} times the {quantity} on input {labels[worst]}"
        if self._context.goal == "throughput":
            total = sum(ratios) / len(ratios)
            return "" if total < 1 - noise else f"gains {1 - total:.1%} on average, within the noise of {noise:.1%}"
        if ratios[worst] >= 1 - noise:
            gain = 1 - ratios[worst]
            verb = "gains" if gain >= 0 else "loses"
            change = f"{verb} {abs(gain):.1%} of the {quantity} on input {labels[worst]}"
            return f"{change}, within the noise of {noise:.1%}"
        return ""

    # Noise and confirmation.

    def _measure_noise(self) -> bool:
        self._tell("eager, twice")
        noises, spreads = [], []
        with self._workload.kept():
            for example in self._context.examples:
                arms = [self._arm(EAGER, example), self._arm(EAGER, example)]
                one, same = self._timer(arms, self._context.device, 2 * self._sample)
                noises.append(noise_of(one, same))
                spreads.append(max(unsteady(one), unsteady(same)))
        self.result.noise = max(noises)
        if self._context.goal == "memory":
            return True
        why = ""
        if self.result.noise > TOO_NOISY:
            why = f"equal runs differ by {self.result.noise:.0%}, and more than {TOO_NOISY:.0%} is too much"
        elif max(spreads) > UNSTEADY:
            why = f"some runs take {max(spreads):.1f} times as long as others that are equal"
        if why:
            self._note(f"the machine is too noisy to decide: {why}; nothing was changed")
        return not why

    def _confirm(self) -> None:
        """Verify the best combination again, and time it beside eager and torch.compile."""
        result = self.result
        failed: set[State] = set()
        while result.best:
            self._tell("the best combination again")
            reason = self._unconfirmed(result.best)
            if not reason:
                break
            self._note(f"{' + '.join(result.best)} was taken back: {reason}")
            result.trials.append(Trial(EAGER, result.best, f"not confirmed: {reason}"))
            failed.add(result.best)
            result.steps = [step for step in result.steps if step.state not in failed]
            result.best = result.steps[-1].state if result.steps else EAGER
            if not result.best and time.monotonic() < self._deadline:
                self._choose(self._next_best(failed))
        self._model.switch(EAGER)
        result.memory = self._memory(EAGER, result.best) if self._workload.training else []
        if not result.best:  # compare eager with itself
            result.over_eager = [
                replace(one, after=one.before, ratio=1.0, undisturbed=1.0) for one in self._timed(EAGER, EAGER)
            ]
            result.over_compile = []

    def _next_best(self, failed: set[State]) -> list[Trial]:
        """Return the trial of the candidate that gains most by itself, except those that failed confirmation."""
        alone = [one for one in self.result.trials if one.kept and one.base == EAGER and one.state not in failed]
        return [max(alone, key=lambda trial: trial.speedup)] if alone else []

    def _unconfirmed(self, state: State) -> str:
        try:
            verdict = self._verified(state)
            if not verdict.ok:
                return verdict.reason
            self.result.over_eager = self._timed(EAGER, state)
            known = state != COMPILE and "compile" in self._candidates and COMPILE in self._gain
            self.result.over_compile = self._timed(COMPILE, state) if known else []
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            self._model.switch(EAGER)
        if self._context.goal == "memory":
            return ""
        for name, comparisons in (("eager", self.result.over_eager), ("torch.compile", self.result.over_compile)):
            slowest = max((comparison.cautious for comparison in comparisons), default=0.0)
            if slowest > 1 + self.result.noise:
                return f"it takes {slowest:.2f} times as long as {name}"
        return ""

    # Notes and progress.

    def _note(self, text: str) -> None:
        if text not in self.result.notes:
            self.result.notes.append(text)

    def _tell(self, trying: str) -> None:
        if self._progress is not None:
            left = max(0.0, self._deadline - time.monotonic())
            total = max(getattr(self, "_total", 1), len(self.result.trials) + 1)
            best = self._gain.get(self.result.best, 1.0)
            self._progress(Progress(trying, len(self.result.trials), total, left, best))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
