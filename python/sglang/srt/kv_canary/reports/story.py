"""What a report says first: one sentence, and a guess at the class of bug."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .classify import Guess, classify
from .evidence import Evidence
from .scene import Scene
from .sentence import sentence
from .slot_moment import SlotMoment
from .violation import STATE_TIER, Violation, render


@dataclass(frozen=True, slots=True)
class Story:
    """Empty if the canary failed to tell it."""

    sentence: str = ""
    guess: Guess | None = None
    history: tuple[SlotMoment, ...] = ()  # of the slot, oldest first
    scene: Scene | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> Story:
        # The rules of the guess know slots of tokens only.
        guess = None if evidence.first.tier == STATE_TIER else classify(evidence)
        return cls(sentence(evidence), guess, evidence.moments, evidence.scene)

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Story:
        """From a `cause` event. Empty for those of older versions."""
        guess = event.get("guess")
        return cls(
            event.get("sentence") or "",
            None if guess is None else Guess.from_event(guess),
            tuple(SlotMoment.from_event(moment) for moment in event.get("history", ())),
            None if (scene := event.get("scene")) is None else Scene.from_event(scene),
        )

    def details(self) -> list[tuple[str, str]]:
        """(name, text) of further lines of the report."""
        moments = [("history", moment.text()) for moment in self.history]
        return moments + ([] if self.scene is None else self.scene.lines())

    @property
    def guess_text(self) -> str:
        """One line, or empty."""
        return "" if self.guess is None else self.guess.text()


def report_of(violation: Mapping[str, Any], causes: Iterable[Mapping[str, Any]]) -> str:
    """The report about a `violation` event, with what the last `cause` event about its cause says."""
    about = [event for event in causes if event["cause"] == violation["cause"]]
    story = Story.from_event(about[-1]) if about else Story()
    found = Violation.from_event(dict(violation))
    details = story.details()
    return render(found, sentence=story.sentence, guess=story.guess_text, details=details)
