"""Keys that come often are kept; those that come in turn do not drive each other out."""

from __future__ import annotations

from symbiosis.finetuning.packed.graph_admission import GraphAdmission


def kept_after(favourites: GraphAdmission, keys: str) -> list[str]:
    """What was kept anew, in the order it was; with a minus, what had to go for it."""
    found = []
    kept = set()
    for key in keys:
        favourites.came(key)
        if key not in kept and favourites.is_worth(key):
            gone = favourites.keep(key)
            kept = kept - {gone} | {key}
            found += [key] if gone is None else [key, f"-{gone}"]
    return found


def test_what_comes_for_the_third_time_is_kept():
    assert kept_after(GraphAdmission(2), "abaacbbcb") == ["a", "b"]


def test_keys_in_turn_do_not_drive_each_other_out():
    assert kept_after(GraphAdmission(2), "abc" * 500) == ["a", "b"]


def test_what_comes_no_more_makes_room():
    favourites = GraphAdmission(2)
    assert kept_after(favourites, "ab" * 200 + "cb" * 400) == ["a", "b", "c", "-a"]


def test_what_cannot_be_kept_is_not_tried_again():
    favourites = GraphAdmission(2)
    for _ in range(3):
        favourites.came("a")
    assert favourites.is_worth("a")
    favourites.refuse("a")
    favourites.came("a")
    assert not favourites.is_worth("a")
    assert not favourites.is_coming("a")


def test_what_may_soon_be_kept_is_coming():
    favourites = GraphAdmission(1)
    favourites.came("a")
    assert favourites.is_coming("a")
    assert kept_after(favourites, "aa") == ["a"]
    for _ in range(3):
        favourites.came("b")
        assert not favourites.is_coming("b"), "there is no room"


def test_what_is_kept_no_more_is_soon_again():
    favourites = GraphAdmission(2)
    assert kept_after(favourites, "aabbaab") == ["a", "b"]
    favourites.keep_none()
    assert kept_after(favourites, "cab") == ["a", "b"]
