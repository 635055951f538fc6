"""The table of pages against a plain list of who uses what."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from phalanx_serve.traffic.scheduler import PAGE, BlockTable, next_name, page_names, root_name

ROOT = root_name("weights", "numerics")
COUNT = 6


class Tables(RuleBasedStateMachine):
    """Texts of up to four pages, of two kinds of tokens, come, grow and go."""

    texts = Bundle("texts")

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(COUNT)
        self.users: list[dict[bytes, int]] = []

    @rule(target=texts, kinds=st.lists(st.booleans(), min_size=1, max_size=4))
    def begin(self, kinds: list[bool]) -> object:
        names = page_names([int(kind) for kind in kinds for _ in range(PAGE)], ROOT)
        held = {}
        for name, place in zip(names, self.table.use_prefix(names), strict=False):
            held[name] = place
        self.users.append(held)
        for before, name in zip([ROOT, *names], names, strict=False):
            if name in held:
                continue
            taken = self.table.take()
            if taken is None:
                in_use = {place for user in self.users for place in user.values()}
                assert len(in_use) == COUNT, "a page is refused only if all are in use"
                break
            assert taken not in {place for user in self.users for place in user.values()}
            held[name] = self.table.name(taken, name, before)
        return held

    @rule(held=consumes(texts))
    def end(self, held: dict[bytes, int]) -> None:
        self.table.release(list(held.values())[::-1])
        self.users = [user for user in self.users if user is not held]

    @rule()
    def forget(self) -> None:
        self.table.drop_unused()
        in_use = {name for user in self.users for name in user}
        assert all(self.table.holds(name) for name in in_use)

    @invariant()
    def used_pages_are_those_of_the_users(self) -> None:
        places = {name: place for user in self.users for name, place in user.items()}
        assert self.table.used == len(set(places.values()))
        assert self.table.available == COUNT - self.table.used
        assert all(self.table.place(name) == place for name, place in places.items())


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_a_name_tells_weights_and_all_tokens_before_apart() -> None:
    text = list(range(3 * PAGE))
    names = page_names(text, ROOT)
    assert len(set(names)) == len(names) == 3
    assert page_names(text[: 3 * PAGE - 1], ROOT) == names[:2]
    assert next_name(names[1], text[2 * PAGE :]) == names[2]
    other_start = page_names([7, *text[1:]], ROOT)
    assert not set(names) & set(other_start)
    assert not set(names) & set(page_names(text, root_name("other weights", "numerics")))


def test_the_leaf_that_was_used_longest_ago_goes_first() -> None:
    table = BlockTable(3)
    first, second = page_names([0] * 2 * PAGE, ROOT)
    (other,) = page_names([1] * PAGE, ROOT)
    places = []
    for before, name in ((ROOT, first), (first, second), (ROOT, other)):
        place = table.take()
        assert place is not None
        places.append(table.name(place, name, before))
    table.release([places[2]])
    table.release([places[1], places[0]])
    assert table.take() is not None
    assert [table.holds(name) for name in (first, second, other)] == [True, True, False]
    assert table.take() is not None
    assert [table.holds(name) for name in (first, second)] == [True, False]
