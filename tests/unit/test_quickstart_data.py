"""Keeps the quickstart's product reviews fit for measuring accuracy on.

A held-out accuracy means something only if no test row is also, nearly, a training row, if guessing the larger
class gains nothing, and if the rows are real prose: sentences made from a template let a model score by learning
the template. The floors and ceilings below lie between the figures of this set and those of a templated one.
It does not judge whether a label is right; that takes a reader.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "manifests" / "examples" / "data" / "product-reviews"

MINIMUM_ROWS = {"train": 440, "validation": 60, "test": 120}
MINIMUM_ROWS_IN_ALL = 600
MAXIMUM_CLASS_DIFFERENCE = 2  # rows, within a split
WORDS_PER_REVIEW = range(6, 61)
MEAN_WORDS = (18.0, 26.0)
MAXIMUM_JACCARD = 0.6  # of the two word sets; unrelated reviews of the set stay below 0.3
MAXIMUM_ROWS_WITH_ONE_OPENING = 6  # the first three words
MAXIMUM_ROWS_WITH_ONE_FIVE_GRAM = 4
MINIMUM_DISTINCT_WORDS = 3_500  # the set has about 4,000; a template over 40 products has a few hundred


@dataclass(frozen=True)
class Review:
    """One row, with its place for the failure message and its words in lower case."""

    place: str
    text: str
    label: str
    words: tuple[str, ...]


def split_into_words(text: str) -> tuple[str, ...]:
    """Lower-case words without punctuation, so that `Broke, twice!` and `broke twice` compare as equal."""
    return tuple(re.findall(r"[^\W_]+(?:['\u2019-][^\W_]+)*", unicodedata.normalize("NFKC", text).casefold()))


def read_split(split: str) -> tuple[Review, ...]:
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    reviews = []
    for number, line in enumerate(lines, start=1):
        row = json.loads(line)
        place = f"{split}.jsonl:{number}"
        assert sorted(row) == ["label", "text"], f"{place}: fields {sorted(row)}, expected label and text"
        assert isinstance(row["text"], str), f"{place}: text is {row['text']!r}, expected a string"
        reviews.append(Review(place, row["text"], row["label"], split_into_words(row["text"])))
    return tuple(reviews)


def shared_by_more_than(limit: int, keys_per_review: Iterable[Iterable[Hashable]]) -> dict[Hashable, int]:
    """Keys that occur in more than `limit` reviews; a key repeated inside one review counts once."""
    counts = Counter(key for keys in keys_per_review for key in set(keys))
    return {key: count for key, count in counts.items() if count > limit}


def n_grams(words: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    return [words[start : start + size] for start in range(len(words) - size + 1)]


def too_similar(reviews: Iterable[Review], limit: float) -> list[tuple[str, str]]:
    """Pairs of places whose word sets have a Jaccard similarity of `limit` or more (1.0 = the same words)."""
    sets = [(review.place, frozenset(review.words)) for review in reviews]
    # The similarity is at most the smaller set's size over the larger's: many pairs need no intersection.
    return [
        (place, other_place)
        for (place, words), (other_place, other) in combinations(sets, 2)
        if min(len(words), len(other)) >= limit * max(len(words), len(other))
        and len(words & other) >= limit * len(words | other)
    ]


@pytest.fixture(scope="module")
def splits() -> dict[str, tuple[Review, ...]]:
    return {split: read_split(split) for split in MINIMUM_ROWS}


@pytest.fixture(scope="module")
def reviews(splits: dict[str, tuple[Review, ...]]) -> tuple[Review, ...]:
    return tuple(review for split in splits.values() for review in split)


def test_the_folder_holds_the_three_splits_and_a_readme_and_nothing_else() -> None:
    assert sorted(path.name for path in DATA.iterdir()) == [
        "README.md",
        "test.jsonl",
        "train.jsonl",
        "validation.jsonl",
    ]


def test_there_are_enough_rows_in_all(reviews: tuple[Review, ...]) -> None:
    assert len(reviews) >= MINIMUM_ROWS_IN_ALL


@pytest.mark.parametrize("split", MINIMUM_ROWS)
def test_a_split_has_enough_rows(split: str, splits: dict[str, tuple[Review, ...]]) -> None:
    assert len(splits[split]) >= MINIMUM_ROWS[split]


@pytest.mark.parametrize("split", MINIMUM_ROWS)
def test_split_has_both_text_labels_in_equal_parts(split: str, splits: dict[str, tuple[Review, ...]]) -> None:
    counts = Counter(review.label for review in splits[split])
    assert sorted(counts) == ["negative", "positive"]
    assert abs(counts["positive"] - counts["negative"]) <= MAXIMUM_CLASS_DIFFERENCE


def test_the_readme_gives_the_sizes_that_the_files_have(splits: dict[str, tuple[Review, ...]]) -> None:
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"\| `(\w+)\.jsonl` \| (\d+) \| (\d+) \| (\d+) \|", readme)
    counts = {split: Counter(review.label for review in rows) for split, rows in splits.items()}
    assert table == [
        (split, str(count.total()), str(count["positive"]), str(count["negative"])) for split, count in counts.items()
    ]


def test_no_two_reviews_read_the_same_within_or_across_splits(reviews: tuple[Review, ...]) -> None:
    places: dict[tuple[str, ...], list[str]] = {}
    for review in reviews:
        places.setdefault(review.words, []).append(review.place)
    assert [same for same in places.values() if len(same) > 1] == []


def test_no_two_reviews_nearly_repeat_each_other_within_or_across_splits(reviews: tuple[Review, ...]) -> None:
    assert too_similar(reviews, MAXIMUM_JACCARD) == []


def test_every_review_has_a_readable_length(reviews: tuple[Review, ...]) -> None:
    odd = [(review.place, len(review.words)) for review in reviews if len(review.words) not in WORDS_PER_REVIEW]
    assert odd == []


def test_reviews_are_short_on_average(reviews: tuple[Review, ...]) -> None:
    shortest, longest = MEAN_WORDS
    assert shortest <= sum(len(review.words) for review in reviews) / len(reviews) <= longest


def test_text_is_printable_and_trimmed_but_not_only_ascii(reviews: tuple[Review, ...]) -> None:
    assert [r.place for r in reviews if not r.text.isprintable() or r.text != " ".join(r.text.split())] == []
    assert any(not review.text.isascii() for review in reviews), "the set should show that unicode passes through"


def test_no_opening_of_a_review_is_overused(reviews: tuple[Review, ...]) -> None:
    assert shared_by_more_than(MAXIMUM_ROWS_WITH_ONE_OPENING, ([r.words[:3]] for r in reviews)) == {}


def test_no_run_of_five_words_recurs_as_in_a_template(reviews: tuple[Review, ...]) -> None:
    assert shared_by_more_than(MAXIMUM_ROWS_WITH_ONE_FIVE_GRAM, (n_grams(r.words, 5) for r in reviews)) == {}


def test_the_vocabulary_is_that_of_free_prose(reviews: tuple[Review, ...]) -> None:
    assert len({word for review in reviews for word in review.words}) >= MINIMUM_DISTINCT_WORDS


def test_templated_rows_are_found_by_similarity_openings_and_repeats() -> None:
    products = ("kettle", "tent", "lamp", "drill", "jacket", "printer", "blender", "mattress")
    texts = [f"I really like this {product} and would buy it again at once." for product in products]
    templated = [Review(text, text, "positive", split_into_words(text)) for text in texts]
    assert len(too_similar(templated, MAXIMUM_JACCARD)) == 28  # all pairs of eight
    assert shared_by_more_than(MAXIMUM_ROWS_WITH_ONE_OPENING, ([r.words[:3]] for r in templated)) == {
        ("i", "really", "like"): 8
    }
    assert shared_by_more_than(MAXIMUM_ROWS_WITH_ONE_FIVE_GRAM, (n_grams(r.words, 5) for r in templated)) == {
        ("and", "would", "buy", "it", "again"): 8,
        ("would", "buy", "it", "again", "at"): 8,
        ("buy", "it", "again", "at", "once"): 8,
    }
