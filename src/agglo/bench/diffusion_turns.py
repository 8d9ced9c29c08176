"""The calls of the diffusion benchmark: which there are, and the turns in which they are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from agglo.bench.diffusion_models import Call, Trajectory
from agglo.bench.diffusion_rows import Contestant, Row
from agglo.hosts.diffusion.state import generation
from agglo.synthesis.evaluation.errors import relative_errors


class Calls:
    """What is to be run, and what the record has of it already. The first row is the dense model."""

    def __init__(self, rows: Sequence[Row], record: dict[str, Any], steps: int, repeats: int) -> None:
        self.rows, self.steps, self.repeats = rows, steps, repeats
        self._records = {(row["name"], row["keep_rate"]): row for row in record["rows"]}

    def planned(self) -> list[tuple[Row, int, int]]:
        """Row, repeat and step of every call that is not known to be impossible."""
        return [
            (row, repeat, step)
            for repeat in range(self.repeats)
            for row in self.rows
            if self.of(row)["cannot"] is None
            for step in row.steps(self.steps)
        ]

    def left(self, repeat: int | None = None) -> int:
        """How many are not on record."""
        return sum(repeat in (None, one[1]) and not self.is_done(*one) for one in self.planned())

    def of(self, row: Row) -> dict[str, Any]:
        return self._records[row.name, row.keep_rate]

    def is_done(self, row: Row, repeat: int, step: int) -> bool:
        return any((call["repeat"], call["step"]) == (repeat, step) for call in self.of(row)["calls"])

    def is_needed(self, row: Row, repeat: int, step: int) -> bool:
        """Whether a call is to be run: it is not on record, or a later one needs the groupings that it keeps."""
        steps = row.steps(self.steps)
        wanted = [one for one in steps if not self.is_done(row, repeat, one)]
        return step in wanted or (row.keeps and step in steps and any(one > step for one in wanted))

    def try_out(self, model: nn.Module, batch: int) -> None:
        """Compile what will be timed, and note what cannot run."""
        for row in self.rows:
            try:
                Contestant(row, model).warm_up(batch)
            except ValueError as error:
                self.of(row)["cannot"] = str(error)


def run_generation(
    model: nn.Module, trajectory: Trajectory, repeat: int, calls: Calls, after: Callable[[str], None]
) -> None:
    """Step after step, all contestants in turns. after: called after every call that is put on record.

    One generation is enough for all: what is kept belongs to a model, and each contestant has its own.
    """
    able = [row for row in calls.rows if calls.of(row)["cannot"] is None]
    dense, *others = (Contestant(row, model) for row in able)
    with generation():
        for step, call in enumerate(trajectory.calls()):
            seconds, right = dense.run(call)
            attention = list(dense.attention)
            if not calls.is_done(dense.row, repeat, step):
                _note(calls, dense, call, repeat, step, seconds, after)
            # There and back, so that nobody always runs in the wake of the same other.
            for contestant in others if (repeat + step // 2) % 2 == 0 else reversed(others):
                row = contestant.row
                if not calls.is_needed(row, repeat, step):
                    continue
                seconds, predicted = contestant.run(call)
                if not calls.is_done(row, repeat, step):
                    errors = {
                        "error": _mean_error([predicted], [right]),
                        "attention_error": _mean_error(contestant.attention, attention),
                    }
                    _note(calls, contestant, call, repeat, step, seconds, after, errors)
                contestant.attention.clear()  # at 4096 tokens, 50 MB per contestant
            trajectory.advance(call.timestep, right)


def _mean_error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    pairs = zip(found, right, strict=True)
    return sum(float(relative_errors(ours, dense).mean()) for ours, dense in pairs) / len(right)


def _note(
    calls: Calls,
    contestant: Contestant,
    call: Call,
    repeat: int,
    step: int,
    seconds: float,
    after: Callable[[str], None],
    errors: dict[str, float] | None = None,
) -> None:
    row = contestant.row
    where = {"repeat": repeat, "step": step, "timestep": call.timestep}
    times = {"seconds": seconds, "clustering": contestant.clustering}
    calls.of(row)["calls"].append({**where, **times, **(errors or {})})
    budget = "" if row.keep_rate is None else f" keep {row.keep_rate:g}"
    after(f"timestep {call.timestep}: {row.name}{budget}: {seconds:.2f} s")
