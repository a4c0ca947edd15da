from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.settings import Checked, Count, Duration, Share, Size, decode


class Leaf(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    root: str
    size_bytes: Size = 0
    wait_s: Duration | None = None


class Tree(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    by_name: dict[str, Leaf] = msgspec.field(default_factory=dict[str, Leaf])
    mode: Literal["read", "write"] = "read"
    share: Share = 1.0
    count: Count = 1
    flag: bool = False
    pair: tuple[int, str] = (0, "")
    words: Annotated[list[str], msgspec.Meta(max_length=2)] = msgspec.field(default_factory=list[str])
    even: Annotated[int, msgspec.Meta(multiple_of=2)] = 0
    code: Annotated[str, msgspec.Meta(pattern="^[a-z]+$")] = "a"


class Open(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    rest: ClassVar[str | None] = "more"

    kind: str
    more: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class Forest(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    open: tuple[Open, ...] = ()


class Foreign(msgspec.Struct, frozen=True, rename="kebab"):
    low_bytes: Size = 0
    high_bytes: Size = 10

    def __post_init__(self):
        if self.low_bytes > self.high_bytes:
            raise ValueError(f"low-bytes {self.low_bytes} is above high-bytes {self.high_bytes}")


def test_what_is_given_arrives_with_units_read_and_lists_frozen():
    tree = decode(
        Tree,
        {
            "leaf": {"root": "/a", "size_bytes": "1KiB"},
            "leaves": [{"root": "/b", "wait_s": "5min"}, {"root": "/c", "wait_s": 3}],
            "by_name": {"x y": {"root": "/d"}},
            "share": 1,
            "pair": [1, "one"],
            "words": ["a", "b"],
        },
    )
    assert tree == Tree(
        leaf=Leaf(root="/a", size_bytes=1024),
        leaves=(Leaf(root="/b", wait_s=300.0), Leaf(root="/c", wait_s=3.0)),
        by_name={"x y": Leaf(root="/d")},
        share=1.0,
        pair=(1, "one"),
        words=["a", "b"],
    )
    assert isinstance(tree.leaves, tuple)
    assert type(tree.share) is float


def test_a_constructor_reads_and_checks_what_a_file_would():
    assert Leaf(root="/a", size_bytes="1KiB", wait_s="5min") == Leaf(root="/a", size_bytes=1024, wait_s=300)
    assert Tree(leaves=[{"root": "/a"}]).leaves == (Leaf(root="/a"),)
    with pytest.raises(ConfigError, match=r"^leaves\[0\]\.size_bytes: -1 given"):
        Tree(leaves=[{"root": "/a", "size_bytes": -1}])


MISTAKES = [
    (None, "nothing given, a table of fields accepted"),
    ([], "a list given, a table of fields accepted"),
    ("text", "'text' given, a table of fields accepted"),
    ({1: 2}, "1: 1 given as a field's name, text accepted"),
    ({"\ud800": 2}, "\\ud800: text with lone surrogates given, text that UTF-8 can encode accepted"),
    ({"leaves": [{"root": "/a"}, {"rot": "/b"}]}, "leaves[1].rot: no such field; did you mean 'root'?"),
    ({"leaf": {"root": "/a", "zzz": 1}}, "leaf.zzz: no such field; Known here: root, size_bytes, wait_s"),
    ({"leaf": {}}, "leaf.root: missing, text required"),
    ({"leaf": {"root": 3}}, "leaf.root: 3 given, text accepted"),
    ({"leaf": {"root": None}}, "leaf.root: nothing given, text accepted"),
    ({"leaf": {"root": "\ud800"}}, "leaf.root: text with lone surrogates given, text that UTF-8 can encode accepted"),
    ({"leaf": 3}, "leaf: 3 given, a table of fields accepted"),
    ({"leaves": {"root": "/a"}}, "leaves: a table given, a list, each element a table of fields accepted"),
    ({"leaves": "abc"}, "leaves: 'abc' given, a list, each"),
    ({"by_name": {"x": {"root": 1}}}, "by_name.x.root: 1 given"),
    ({"by_name": [1]}, "by_name: a list given, a table of fields accepted"),
    ({"by_name": {1: {"root": ""}}}, "by_name.1: 1 given as a field's name, text accepted"),
    ({"mode": "append"}, "mode: 'append' given, 'read' or 'write' accepted"),
    ({"share": 0}, "share: 0 given, a number, more than 0 and at most 1 accepted"),
    ({"share": float("nan")}, "share: nan given, a number, more than 0"),
    ({"count": 0}, "count: 0 given, an integer, at least 1 and at most 2,147,483,647 accepted"),
    ({"count": 1.0}, "count: 1.0 given, an integer"),
    ({"count": 10**5_000}, "count: an integer of 16,610 bits given, an integer, at least 1"),
    ({"count": True}, "count: true given, an integer"),
    ({"count": "3"}, "count: '3' given, an integer"),
    ({"count": "x" * 10_000}, f"count: '{'x' * 78}… given, an integer"),
    ({"flag": 1}, "flag: 1 given, true or false accepted"),
    ({"pair": [1]}, "pair: a list given, a list"),
    ({"words": ["a", 2]}, "words[1]: 2 given, text accepted"),
    ({"words": ["a", "b", "c"]}, "words: a list given, a list, of length at most 2, each element text accepted"),
    ({"even": 3}, "even: 3 given, an integer, a multiple of 2 accepted"),
    ({"code": "1"}, "code: '1' given, text, matching ^[a-z]+$ accepted"),
    *(
        ({"leaf": {"root": "", "size_bytes": given}}, f"leaf.size_bytes: {words} given, bytes as an integer, or text")
        for given, words in ((True, "true"), (1.0, "1.0"), (-1, "-1"), ("1 GiBs", "'1 GiBs'"), ("9999PiB", "'9999PiB'"))
    ),
    *(
        ({"leaf": {"root": "", "wait_s": given}}, f"leaf.wait_s: {words} given, seconds as a number, or text such as")
        for given, words in ((float("inf"), "inf"), (False, "false"), ("1 week", "'1 week'"))
    ),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES)
def test_a_mistake_is_named_by_its_path_what_was_given_and_what_would_do(given, message):
    with pytest.raises(ConfigError) as plain:
        decode(Tree, given)
    assert str(plain.value).startswith(message)
    with pytest.raises(ConfigError) as placed:
        decode(Tree, given, where="engine.tree")
    assert str(placed.value).startswith(("engine.tree.", "engine.tree: "))
    assert str(placed.value).removeprefix("engine.tree")[1:].strip().startswith(message)


def test_a_missing_field_is_looked_for_among_the_misspelt_ones():
    with pytest.raises(
        ConfigError, match=r"(?m)^open\[0\]\.kind: missing, text required \(did you mean it by 'kin'\?\)$"
    ):
        decode(Forest, {"open": [{"kin": "a"}]})


def test_unknown_keys_go_into_the_field_for_the_rest():
    flat = decode(Open, {"kind": "a", "x": 1, "y": {"z": [1, (2,)]}})
    assert flat == Open(kind="a", more={"x": 1, "y": {"z": [1, [2]]}})


REST_MISTAKES = [
    ({"x": {"y": [b"bytes"]}}, "open[0].x.y[0]: a value of type bytes given, text, a number"),
    ({"x": float("inf")}, "open[0].x: inf given, a finite number accepted"),
    ({"x": 1 << 64}, "open[0].x: an integer of 65 bits given, an integer of at most 64 bits accepted"),
    ({"x": {"\udfff": 1}}, "open[0].x.\\udfff: text with lone surrogates given, text that UTF-8 can encode accepted"),
]


@pytest.mark.parametrize(("given", "message"), REST_MISTAKES)
def test_the_rest_must_be_plain_data(given, message):
    with pytest.raises(ConfigError) as caught:
        decode(Forest, {"open": [{"kind": "a", **given}]})
    assert str(caught.value).startswith(message)


def test_a_struct_that_is_not_ours_is_decoded_as_strictly():
    assert decode(Foreign, {"low-bytes": "1kB", "high-bytes": "1KiB"}) == Foreign(low_bytes=1000, high_bytes=1024)
    with pytest.raises(ConfigError, match=r"(?m)^tiers\[0\]: low-bytes 11 is above high-bytes 10$"):
        decode(Foreign, {"low-bytes": 11}, where="tiers[0]")
    with pytest.raises(ConfigError, match=r"(?m)^low-bytes 11 is above high-bytes 10$"):
        decode(Foreign, {"low-bytes": 11})
    with pytest.raises(ConfigError, match=r"^low_bytes: no such field; did you mean 'low-bytes'\?"):
        decode(Foreign, {"low_bytes": 11})


def test_siblings_are_named_beside_the_fields():
    with pytest.raises(ConfigError, match=r"(?m)did you mean 'limits'\? Known here: limits, root, size_bytes, wait_s$"):
        decode(Leaf, {"root": "/a", "limts": {}}, siblings=["limits"])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*Tree.__struct_fields__, *Leaf.__struct_fields__])


@given(given_=st.dictionaries(FIELDS, ANYTHING | st.dictionaries(FIELDS, ANYTHING), max_size=4))
def test_whatever_is_given_is_a_struct_or_a_config_error(given_):
    try:
        tree = decode(Tree, given_)
    except ConfigError:
        return
    assert msgspec.json.decode(msgspec.json.encode(tree), type=Tree) == tree
