"""The planner's promises, checked against definitions that share no code with it."""

import doctest
import itertools
import math
import os

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shapes import MODELS
from fsdp_compose.core.flat import layout as layout_module
from fsdp_compose.core.flat.layout import FlatLayout, Granule, LocalShard, ParamSpec, plan_layout
from tests.internals import executed_lines

settings.register_profile("layout", deadline=None, max_examples=300, derandomize="CI" in os.environ)
properties = settings(settings.get_profile("layout"))


# --- Random problems --------------------------------------------------------------------------------------------------

shapes = st.one_of(
    st.lists(st.integers(1, 7), max_size=3).map(tuple),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.tuples(st.integers(1, 80)),
    st.tuples(st.integers(1, 20), st.integers(1, 12)),
)


def granules(shape: tuple[int, ...]) -> st.SearchStrategy[Granule | None]:
    choices: list[st.SearchStrategy[Granule | None]] = [
        st.none(),
        st.sampled_from(["elements", "rows", "whole"]),
        st.integers(1, 40),
    ]
    if shape:
        choices.append(st.lists(st.integers(1, 5), min_size=1, max_size=len(shape)).map(tuple))
    return st.one_of(choices)


@st.composite
def param_specs(draw: st.DrawFn, max_size: int = 6) -> list[ParamSpec]:
    drawn = [(shape, draw(granules(shape))) for shape in draw(st.lists(shapes, max_size=max_size))]
    return [ParamSpec(f"p{index}", shape, granule) for index, (shape, granule) in enumerate(drawn)]


world_sizes = st.one_of(st.integers(1, 9), st.sampled_from([16, 33, 64]))
alignments = st.sampled_from([1, 2, 3, 4, 8])
budgets = st.sampled_from([0.0, 0.01, 0.1, 1.0])
problems = {"specs": param_specs(), "world_size": world_sizes, "alignment": alignments, "budget": budgets}


def local_shards(plan: FlatLayout, index: int) -> list[LocalShard]:
    return [plan.local_shard(index, rank) for rank in range(plan.world_size)]


# --- Properties -------------------------------------------------------------------------------------------------------


@properties
@given(**problems)
def test_every_element_lies_in_exactly_one_place_and_in_order(specs, world_size, alignment, budget):
    plan = plan_layout(specs, world_size, alignment, budget)
    flat: list[object] = [None] * plan.flat_numel
    for index, spec in enumerate(specs):
        expected_start = 0
        for rank, part in enumerate(local_shards(plan, index)):
            assert 0 <= part.shard_start <= part.shard_start + part.numel <= plan.shard_numel
            assert part.param_start == expected_start
            for element in range(part.numel):
                place = rank * plan.shard_numel + part.shard_start + element
                assert flat[place] is None
                flat[place] = (index, part.param_start + element)
            expected_start += part.numel
        assert expected_start == math.prod(spec.shape) == plan.params[index].numel
    placed = [owner for owner in flat if owner is not None]
    assert placed == [(index, element) for index, spec in enumerate(specs) for element in range(math.prod(spec.shape))]


@properties
@given(**problems)
def test_no_granule_spans_two_shards(specs, world_size, alignment, budget):
    plan = plan_layout(specs, world_size, alignment, budget)
    for index, spec in enumerate(specs):
        if spec.granule is None:
            continue
        ranks = [rank for rank, part in enumerate(local_shards(plan, index)) for _ in range(part.numel)]
        rank_of_granule: dict[object, int] = {}
        for element, position in enumerate(itertools.product(*map(range, spec.shape))):
            granule = granule_of(spec.granule, position, element)
            assert rank_of_granule.setdefault(granule, ranks[element]) == ranks[element]


def granule_of(granule: Granule, position: tuple[int, ...], element: int) -> object:
    """A name for the granule that holds this element."""
    if granule == "elements":
        return element
    if granule == "rows":
        return position[:1]
    if granule == "whole":
        return None
    if isinstance(granule, int):
        return element // granule
    num_leading = len(position) - len(granule)
    block = [index // size for index, size in zip(position[num_leading:], granule, strict=True)]
    return (*position[:num_leading], *block)


@properties
@given(**problems)
def test_parameters_and_shards_are_aligned_and_gaps_fill_the_rest(specs, world_size, alignment, budget):
    plan = plan_layout(specs, world_size, alignment, budget)
    assert plan.shard_numel > 0 and plan.shard_numel % alignment == 0
    assert all(param.offset % alignment == 0 for param in plan.params)
    taken = [(param.offset, param.offset + param.numel) for param in plan.params if param.numel]
    edges = [0, *itertools.chain(*sorted([*taken, *plan.gaps()])), plan.flat_numel]
    assert edges[0::2] == edges[1::2]  # each interval starts where the one before it stops
    assert sum(stop - start for start, stop in plan.gaps()) == plan.padding_numel
    assert list(plan.gaps()) == sorted(plan.gaps())


@properties
@given(**problems)
def test_local_shape_holds_the_local_shard_and_stacks_up_to_the_parameter(specs, world_size, alignment, budget):
    plan = plan_layout(specs, world_size, alignment, budget)
    for index, (spec, param) in enumerate(zip(specs, plan.params, strict=True)):
        local_shapes = [plan.local_shape(index, rank) for rank in range(world_size)]
        assert [math.prod(shape) for shape in local_shapes] == [part.numel for part in local_shards(plan, index)]
        if spec.shape == ():
            assert sorted(local_shapes) == [(), *[(0,)] * (world_size - 1)]
        elif param.row_aligned:
            assert {shape[1:] for shape in local_shapes} == {spec.shape[1:]}
            if param.numel:
                assert sum(shape[0] for shape in local_shapes) == spec.shape[0]
        else:
            assert {len(shape) for shape in local_shapes} == {1}
        inner = math.prod(spec.shape[1:])
        parts = local_shards(plan, index)
        assert param.row_aligned == all(part.param_start % inner == 0 for part in parts if part.numel)


@properties
@given(**problems)
def test_preferring_rows_stays_within_the_budget(specs, world_size, alignment, budget):
    plan = plan_layout(specs, world_size, alignment, budget)
    elements = [ParamSpec(spec.fqn, spec.shape, spec.granule or "elements") for spec in specs]
    unavoidable = plan_layout(elements, world_size, alignment, budget)
    assert plan.padding_numel <= max(unavoidable.padding_numel, budget * plan.payload_numel)
    assert plan.granule_padding_numel == unavoidable.granule_padding_numel <= unavoidable.padding_numel


@settings(properties, derandomize=True)
@given(specs=param_specs(max_size=4), world_size=st.integers(1, 12), alignment=alignments)
def test_the_shard_is_as_short_as_exhaustive_search_makes_it(specs, world_size, alignment):
    specs = [ParamSpec(spec.fqn, spec.shape, spec.granule or "elements") for spec in specs]
    plan = plan_layout(specs, world_size, alignment)
    granule_numels = [param.granule for param in plan.params]
    for shard_numel in range(alignment, plan.shard_numel, alignment):
        assert not fits(specs, granule_numels, world_size, alignment, shard_numel)


def fits(specs, granule_numels, world_size, alignment, shard_numel) -> bool:
    flat_numel, start = world_size * shard_numel, 0
    for spec, granule in zip(specs, granule_numels, strict=True):
        stop = start + math.prod(spec.shape)
        while any((boundary - start) % granule for boundary in range(0, stop, shard_numel) if boundary > start):
            start, stop = start + alignment, stop + alignment
            if stop > flat_numel:
                return False
        if stop > flat_numel:
            return False
        start = -(-stop // alignment) * alignment
    return True


@properties
@given(specs=param_specs(), world_size=world_sizes, alignment=alignments)
def test_elements_cost_no_padding_but_alignment(specs, world_size, alignment):
    specs = [ParamSpec(spec.fqn, spec.shape, "elements") for spec in specs]
    plan = plan_layout(specs, world_size, alignment)
    aligned = sum(-(-math.prod(spec.shape) // alignment) for spec in specs)
    assert plan.shard_numel == max(1, -(-aligned // world_size)) * alignment
    assert plan.granule_padding_numel == 0


# --- Pictures ---------------------------------------------------------------------------------------------------------


def render(plan: FlatLayout) -> str:
    """The flat parameter, one letter an element, and below it each parameter's local shapes."""
    flat = ["."] * plan.flat_numel
    for param in plan.params:
        flat[param.offset : param.offset + param.numel] = param.fqn * param.numel
    starts = range(0, plan.flat_numel, plan.shard_numel)
    lines = ["|" + "|".join("".join(flat[start : start + plan.shard_numel]) for start in starts) + "|"]
    for index, param in enumerate(plan.params):
        local_shapes = [plan.local_shape(index, rank) for rank in range(plan.world_size)]
        lines.append(f"{param.fqn} {param.shape}: " + " ".join(str(shape).replace(" ", "") for shape in local_shapes))
    return "\n".join(lines)


def test_shard_boundaries_fall_between_rows_as_the_module_docstring_draws_it():
    plan = plan_layout([ParamSpec("a", (5, 4)), ParamSpec("b", (3,)), ParamSpec("c", (2, 4))], 3, alignment=4)
    picture = render(plan)
    assert picture.splitlines()[0] in layout_module.__doc__
    assert_expected_inline(
        picture,
        """\
|aaaaaaaaaaaa|aaaaaaaabbb.|cccccccc....|
a (5, 4): (3,4) (2,4) (0,4)
b (3,): (0,) (3,) (0,)
c (2, 4): (0,4) (0,4) (2,4)""",
    )


def test_the_budget_decides_whether_rows_stay_whole():
    specs = [ParamSpec("a", (7, 3)), ParamSpec("b", (2, 6))]
    # `a` is sharded by elements; the padding that remains in any case still brings the rows of `b` to a boundary.
    assert_expected_inline(
        render(plan_layout(specs, 5, alignment=1, padding_budget=0)),
        """\
|aaaaaaa|aaaaaaa|aaaaaaa|.bbbbbb|bbbbbb.|
a (7, 3): (7,) (7,) (7,) (0,) (0,)
b (2, 6): (0,6) (0,6) (0,6) (1,6) (1,6)""",
    )
    assert_expected_inline(
        render(plan_layout(specs, 5, alignment=1, padding_budget=0.4)),
        """\
|aaaaaaaaa|aaaaaaaaa|aaabbbbbb|bbbbbb...|.........|
a (7, 3): (3,3) (3,3) (1,3) (0,3) (0,3)
b (2, 6): (0,6) (0,6) (1,6) (1,6) (0,6)""",
    )


def test_rows_are_dropped_first_where_they_move_a_parameter_most():
    specs = [ParamSpec("a", (2, 2)), ParamSpec("b", (2, 2)), ParamSpec("c", (1, 3))]
    assert_expected_inline(
        render(plan_layout(specs, 4, alignment=1, padding_budget=0)),
        """\
|.aa|aab|bbb|ccc|
a (2, 2): (1,2) (1,2) (0,2) (0,2)
b (2, 2): (0,) (1,) (3,) (0,)
c (1, 3): (0,3) (0,3) (0,3) (1,3)""",
    )


def test_one_shard_boundary_inside_a_row_makes_all_local_shards_flat():
    specs = [ParamSpec("a", (2,)), ParamSpec("b", (5, 3))]
    assert_expected_inline(
        render(plan_layout(specs, 4, alignment=1, padding_budget=0)),
        """\
|aabbb|bbbbb|bbbbb|bb...|
a (2,): (2,) (0,) (0,) (0,)
b (5, 3): (3,) (5,) (5,) (2,)""",
    )


def test_granules_stay_whole_at_any_cost():
    specs = [ParamSpec("a", (3,), "whole"), ParamSpec("b", (4, 4), (2, 2)), ParamSpec("c", (7,), 3)]
    plan = plan_layout(specs, 4, alignment=2)
    assert [param.granule for param in plan.params] == [3, 8, 3]
    assert_expected_inline(
        render(plan) + f"\ncost of the granules: {plan.granule_padding_numel}",
        """\
|aaa.....|bbbbbbbb|bbbbbbbb|ccccccc.|
a (3,): (3,) (0,) (0,) (0,)
b (4, 4): (0,4) (2,4) (2,4) (0,4)
c (7,): (0,) (0,) (0,) (7,)
cost of the granules: 0""",
    )
    plan = plan_layout([ParamSpec("a", (2, 5), "whole"), ParamSpec("b", (2, 3), "rows")], 4, alignment=2)
    assert_expected_inline(
        render(plan) + f"\ncost of the granules: {plan.granule_padding_numel}",
        """\
|aaaaaaaaaa|bbbbbb....|..........|..........|
a (2, 5): (2,5) (0,5) (0,5) (0,5)
b (2, 3): (0,3) (2,3) (0,3) (0,3)
cost of the granules: 24""",
    )


def test_scalars_and_empty_parameters_have_shapes_on_every_rank():
    specs = [ParamSpec("s", ()), ParamSpec("e", (0, 4)), ParamSpec("z", (3, 0)), ParamSpec("o", (1,))]
    assert_expected_inline(
        render(plan_layout(specs, 3, alignment=1)),
        """\
|s|o|.|
s (): () (0,) (0,)
e (0, 4): (0,4) (0,4) (0,4)
z (3, 0): (0,0) (0,0) (0,0)
o (1,): (0,) (1,) (0,)""",
    )


def test_no_payload_still_gives_a_shard():
    for specs in ([], [ParamSpec("e", (0,))]):
        plan = plan_layout(specs, 2, alignment=8)
        assert (plan.shard_numel, plan.padding_fraction, plan.gaps()) == (8, 0.0, ((0, 16),))


@pytest.mark.parametrize(
    ("shape", "granule", "expected"),
    [
        ((4, 6), "elements", 1),
        ((4, 6), "rows", 6),
        ((4, 6), "whole", 24),
        ((4, 6), 7, 7),
        ((4, 6), 100, 24),
        ((4, 6), (2, 3), 12),
        ((4, 6), (3, 6), 18),
        ((4, 6), (3,), 3),
        ((4, 6), (4,), 6),
        ((4, 6), (1, 3), 3),
        ((4, 6), (1, 1), 1),
        ((10,), (4,), 4),
        ((5, 4, 6), (2, 2), 12),
        ((5, 4, 6), (3, 2), 24),
        ((5, 4, 6), (2, 1, 1), 48),
        ((256, 1024), (128, 128), 128 * 1024),
        ((), "rows", 1),
        ((0, 4), "rows", 1),
    ],
)
def test_granules_in_elements(shape, granule, expected):
    assert plan_layout([ParamSpec("w", shape, granule)], 2, alignment=1).params[0].granule == expected


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granule", [0, -1, True, 2.0, "row", (), (2, 0), (2, -1), [2, 2], ("rows",)])
def test_unknown_granule_names_parameter_and_choices(granule):
    with pytest.raises(ValueError, match=r"block\.w \(4, 4\): got granule .*, expected 'elements', 'rows', 'whole', a"):
        ParamSpec("block.w", (4, 4), granule)


def test_block_with_more_dims_than_the_parameter_is_rejected():
    with pytest.raises(ValueError, match=r"b \(4,\): got granule \(128, 128\), expected a block of at most 1 dims"):
        ParamSpec("b", (4,), (128, 128))


def test_impossible_sizes_are_rejected():
    with pytest.raises(ValueError, match=r"w: got shape \(2, -1\)"):
        ParamSpec("w", (2, -1))
    for world_size, alignment, budget in [(0, 1, 0.0), (1, 0, 0.0), (1, 1, -0.1), (1, 1, math.nan), (1, 1, math.inf)]:
        with pytest.raises(ValueError, match=r"got .*expected"):
            plan_layout([], world_size, alignment, budget)


# --- Real models ------------------------------------------------------------------------------------------------------


def plan_model(name: str, world_size: int, granule: Granule | None = None) -> FlatLayout:
    specs = [ParamSpec(f"param{index}", shape, granule) for index, shape in enumerate(MODELS[name])]
    return plan_layout(specs, world_size, alignment=8)


@pytest.mark.parametrize("name", MODELS)
def test_padding_of_real_models_is_at_most_one_percent(name):
    fractions = {world_size: plan_model(name, world_size).padding_fraction for world_size in (8, 64, 256, 1024)}
    print(f"\n{name}: " + ", ".join(f"{100 * fraction:.3f} % at {ranks}" for ranks, fraction in fractions.items()))
    assert max(fractions.values()) <= 0.01


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_kept_at_eight_ranks_unless_a_row_outweighs_the_budget(name):
    plan = plan_model(name, 8)
    # A fused expert's row is one expert: 1 / 24 of a shard.
    num_by_elements = 2 if name == "128 fused experts" else 0
    assert sum(not param.row_aligned for param in plan.params) == num_by_elements


def test_tiny_group_on_many_ranks_pays_only_alignment():
    plan = plan_layout([ParamSpec(f"p{index}", (16,)) for index in range(12)], 64, alignment=8)
    assert plan.shard_numel == 8


@pytest.mark.parametrize("name", MODELS)
def test_whole_parameters_need_no_more_than_the_largest_at_many_ranks(name):
    assert plan_model(name, 4096, "whole").shard_numel == max(map(math.prod, MODELS[name]))


def test_same_input_gives_an_equal_plan():
    plans = {plan_model("GPT-2 small block", 64), plan_model("GPT-2 small block", 64)}
    assert len(plans) == 1


def test_llama_block_is_planned_in_few_steps_on_4096_ranks():
    """1,900 lines, about a millisecond, which grow with the parameters and not with the ranks."""
    layout_module.clear_plans()
    assert executed_lines(lambda: plan_model("Llama-3-8B block", 4096)) < 4000


# --- Documentation ----------------------------------------------------------------------------------------------------


def test_docstring_examples_run():
    results = doctest.testmod(layout_module)
    assert results.attempted and not results.failed


def test_ranks_with_less_of_a_parameter_have_it_at_the_same_place():
    planned = plan_layout([ParamSpec("a", (4, 5)), ParamSpec("b", (3,)), ParamSpec("c", (4, 4))], 2, 4)
    own = planned.with_shapes([(3, 5), (3,), (4, 3)])
    assert planned.with_shapes([(4, 5), (3,), (4, 4)]) is planned
    assert [param.offset for param in own.params] == [param.offset for param in planned.params]
    assert own.shard_numel == planned.shard_numel and own.params[1] == planned.params[1]
    for i, numel in enumerate((15, 3, 12)):
        parts = own.local_shards_of(i)
        assert {rank: part.numel for rank, part in parts.items()} == {
            rank: count for rank, count in enumerate(own.counts(i)) if count
        }
        assert sum(own.counts(i)) == numel
    covered = sorted([*own.gaps(), *((p.offset, p.offset + p.numel) for p in own.params)])
    assert covered[0][0] == 0 and covered[-1][1] == own.flat_numel
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(covered))
