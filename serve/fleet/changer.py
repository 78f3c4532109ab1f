"""What changes while several models are served: one is loaded or taken away, shares move, and no request fails.

A change is a generator that goes on whenever the fleet has looked after its models, so that none of them waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from penjing.core.errors import ConfigError, PenjingError, ServerError
from penjing.serve.families.base import family_at
from penjing.serve.fleet.change import Answered, Change, take_change, tell
from penjing.serve.fleet.member import Member
from penjing.serve.fleet.names import changed_shares
from penjing.serve.fleet.plan import FleetModel

TAKE_SECONDS = 0.2  # between two looks for a change
HEARD_SECONDS = 0.5  # from the front's last word until it has read it for sure, and asks the model nothing any more

Going = Iterator[None]


class Changer:
    """Makes one change after the other.

    Args:
        members: those that are served, in order; changed in place.
        port: by which the fleet is known.
        show: tells the front of `members`.
        heard: whether the front knows.
    """

    def __init__(self, members: list[Member], port: int, show: Callable[[], None], heard: Callable[[], bool]) -> None:
        self.members, self._port, self._show, self._heard = members, port, show, heard
        self.between: list[Member] = []
        """Members that are loaded or taken away just now."""
        self._before: dict[str, dict[str, float]] = {}  # shares of each model's versions, before they were last changed
        self._change: Change | None = None
        self._going: Going | None = None
        self._said: str = ""
        self._untold: Answered | None = None
        self._looked = 0.0

    def step(self) -> str | None:
        """Go on with what is under way, or look for what is wanted; a line for the log when a change is made or not."""
        if self._untold is not None and tell(self._port, self._untold):
            self._untold = None
        if self._going is None:
            if (now := time.monotonic()) < self._looked + TAKE_SECONDS:
                return None
            self._looked = now
            if (change := take_change(self._port)) is None:
                return None
            self._change, self._going = change, self._make(change)
        assert self._change is not None, "it is what goes on"
        try:
            next(self._going)
            return None
        except StopIteration:
            failed = False
        except PenjingError as error:
            self._said, failed = str(error), True
        except Exception as error:  # the machine's refusal, or a defect of ours, must not end the models that answer
            self._said, failed = f"the change has failed: {type(error).__name__}: {error}; the others go on", True
        outcome = Answered(id=self._change.id, said=self._said, failed=failed)
        self._change = self._going = None
        self._untold = None if tell(self._port, outcome) else outcome
        return self._said

    def _make(self, change: Change) -> Going:
        if change.load is not None:
            yield from self._load(change.load)
        elif change.unload is not None:
            yield from self._unload(change.unload)
        elif change.shares:
            self._give({name.rpartition(":")[0] for name in change.shares}, change.shares)
        elif change.back is not None:
            self._give_back(change.back)

    def _load(self, model: FleetModel) -> Going:
        """Start it beside the others; clients are told of it when it answers."""
        self._check_new(model)
        host = self.members[0].model.config.host
        member = Member(model.model_copy(update={"config": model.config.model_copy(update={"host": host})}))
        self.between.append(member)
        try:
            member.start()
            while not member.ready:
                if (failure := member.failure()) is not None:
                    raise ServerError(f"{model.id} cannot be loaded: {failure}; the others go on")
                yield
        except Exception:
            member.kill()
            raise
        finally:
            self.between.remove(member)
        if model.group is not None:
            for other in self.members:
                if other.model.id == model.group:  # it had no version: it is the first one from now on
                    first = {"id": f"{model.group}:1", "group": model.group, "version": 1}
                    other.model = other.model.model_copy(update=first)
        share = model.share if model.group is not None and self._shares(model.group) else 1.0
        self.members.append(member)
        self._set_share(member, 0.0 if model.group is not None else 1.0)
        if model.group is not None:
            self._set_shares(changed_shares(self._shares(model.group), {model.id: share}))
        self._show()
        self._said = f"{member.model.endpoint} is ready" + self._shown(model.group)

    def _check_new(self, model: FleetModel) -> None:
        taken = {other.model.id: other for other in self.members}
        groups = {other.model.group: other for other in self.members if other.model.group is not None}
        if model.id in taken or (model.version == 1 and model.group in taken):
            raise ConfigError(f"{model.id} is served already; choose another name or version")
        if model.group is None and model.id in groups:
            raise ConfigError(f"{model.id} has versions; give this one a version too, such as {model.id}:2")
        if model.group is not None and (other := groups.get(model.group) or taken.get(model.group)) is not None:
            kinds = other.shown.kind, family_at(model.folder).name
            if kinds[0] != kinds[1]:
                raise ConfigError(f"{other.model.id} is of the kind {kinds[0]}, and {model.folder} of {kinds[1]}")

    def _unload(self, name: str) -> Going:
        """Send it no more requests; it ends when its answers have."""
        member = next((member for member in self.members if member.model.id == name), None)
        if member is None:
            raise ConfigError(f"there is no {name!r} to unload; there is {', '.join(self._ids)}")
        if len(self.members) == 1:
            raise ConfigError(f"{name} is the only model; 'penjing stop' ends the server")
        group = member.model.group
        if group is not None and len(self._shares(group)) > 1 and member.model.share:
            raise ConfigError(f"{name} has {member.model.share:.0%} of the requests for {group}; promote another first")
        self.members.remove(member)
        self.between.append(member)
        self._show()
        shown = time.monotonic()
        while not self._heard() or time.monotonic() < shown + HEARD_SECONDS:
            yield
        member.ask_to_end()
        while not member.ended:
            yield
        member.kill()
        self.between.remove(member)
        self._said = f"{name} has ended" + self._shown(group)

    def _give(self, groups: set[str], given: Mapping[str, float]) -> None:
        if len(groups) != 1 or not (shares := self._shares(group := groups.pop())):
            raise ConfigError(f"name versions of one model, such as llm:2; there is {', '.join(self._ids)}")
        self._move(group, changed_shares(shares, given))

    def _give_back(self, group: str) -> None:
        before = self._before.get(group)
        if before is None:
            raise ConfigError(f"no share of {group} has been changed since the server started")
        if gone := [name for name in before if before[name] and name not in self._ids]:
            raise ConfigError(f"{', '.join(gone)} had a part of the requests for {group} and is served no more")
        self._move(group, dict.fromkeys(self._shares(group), 0.0) | {n: s for n, s in before.items() if n in self._ids})

    def _move(self, group: str, shares: Mapping[str, float]) -> None:
        self._before[group] = self._shares(group)
        self._set_shares(shares)
        self._show()
        self._said = self._shown(group).removeprefix("; ")

    def _set_shares(self, shares: Mapping[str, float]) -> None:
        for member in self.members:
            with suppress(KeyError):
                self._set_share(member, shares[member.model.id])

    def _set_share(self, member: Member, share: float) -> None:
        member.model = member.model.model_copy(update={"share": share})

    @property
    def _ids(self) -> list[str]:
        return [member.model.id for member in self.members]

    def _shares(self, group: str) -> dict[str, float]:
        return {member.model.id: member.model.share for member in self.members if member.model.group == group}

    def _shown(self, group: str | None) -> str:
        shares = {} if group is None else self._shares(group)
        return "; " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) if shares else ""
