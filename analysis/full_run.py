"""Everything that one analysis measures: a run, what edits cost, and the same architecture with random weights."""

from dataclasses import dataclass

from analysis.causal.costs import Causal
from analysis.checks import Check
from analysis.run import Run


@dataclass(frozen=True)
class FullRun:
    """A run with what was measured beside it.

    Attributes:
        run: the activations, reduced to moments.
        causal: what edits cost the model; None if it was not measured.
        random: a run of the same architecture with random weights on the same tokens; None if it was not asked for.
    """

    run: Run
    causal: Causal | None = None
    random: Run | None = None

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every check and control of all of it."""
        runs = (self.run,) if self.random is None else (self.run, self.random)
        own = tuple(check for run in runs for check in run.checks)
        return own if self.causal is None else (*own, *self.causal.checks(self.run.model["dtype"]))

    @property
    def passed(self) -> bool:
        """Whether all of them passed."""
        return all(check.passed for check in self.checks)
