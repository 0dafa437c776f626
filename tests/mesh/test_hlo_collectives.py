"""Collectives read from a compiled program's text: kinds, bytes, groups, names, and the loops that they stand in."""

from swift.mesh.hlo_collectives import Loop, collectives

HLO = """HloModule jit_step, num_partitions=6

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (x: f32[4]) -> f32[4] {
  ROOT %deep = f32[4]{0} all-reduce(%x), replica_groups=[3,2]<=[2,3]T(1,0), to_apply=%add, metadata={op_name="jit(f)/W/psum"}
}

%inner_body.1 (p: (f32[4], s32[])) -> (f32[4], s32[]) {
  %fused = f32[4]{0} fusion(%x), kind=kCustom, calls=%wrapped
}

%inner_condition (p: (f32[4], s32[])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%taken (p: f32[4]) -> f32[4] {
  %loop = (f32[4]{0}, s32[]) while(%start), condition=%inner_condition, body=%inner_body.1, metadata={op_name="jit(f)/W/while"}, backend_config={"known_trip_count":{"n":"5"}}
}

%outer_body (p: (f32[4], s32[])) -> (f32[4], s32[]) {
  %choice = f32[4]{0} conditional(%which, %x, %x), branch_computations={%untaken, %taken}, metadata={op_name="jit(f)/W/cond"}
  %moved = bf16[2,3]{1,0:T(8,128)} collective-permute(%y), channel_id=3, source_target_pairs={{0,2},{2,4}}, metadata={op_name="jit(f)/activations/round_0/cond/branch_2_fun/ppermute"}
}

%untaken (p: f32[4]) -> f32[4] {
  ROOT %same = f32[4]{0} copy(%p)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %ticks = (f32[4]{0}, s32[]) while(%start), condition=%inner_condition, body=%outer_body, metadata={op_name="jit(f)/while"}
  ROOT %all = pred[7]{0} all-gather(%q), replica_groups={{0,1,2},{3,4,5}}, metadata={op_name="jit(f)/transpose(jvp(U))/all_gather"}
}
"""  # noqa: E501


def test_what_a_collective_is_and_where_it_stands():
    deep, moved, every = collectives(HLO, num_devices=6)
    ticks = Loop(("jit", "f", "while"), None)
    assert (deep.kind, deep.num_bytes, deep.path) == ("all-reduce", 16, ("jit", "f", "W", "psum"))
    assert deep.groups == ((0, 3), (1, 4), (2, 5))
    # Through the fusion, the body of a loop of known length, the branch, to the loop over ticks.
    assert deep.loops == (Loop(("jit", "f", "W", "while"), 5), ticks)
    assert (moved.kind, moved.num_bytes, moved.pairs) == ("collective-permute", 12, ((0, 2), (2, 4)))
    assert moved.path[-3:] == ("cond", "branch_2_fun", "ppermute")
    assert moved.loops == (ticks,)
    assert (every.kind, every.num_bytes, every.groups) == ("all-gather", 7, ((0, 1, 2), (3, 4, 5)))
    assert "U" in every.path
    assert every.loops == ()


RAGGED = """
ENTRY %main (x: bf16[8,256], n: s32[2]) -> bf16[6,256] {
  %x = bf16[8,256]{1,0} parameter(0)
  %rows.1 = bf16[6,256]{1,0:T(8,128)(2,1)} fusion(%x), kind=kLoop, calls=%wrapped
  %none.1 = bf16[9,256]{1,0} broadcast(%zero), dimensions={}
  %on_tpu = bf16[9,256]{1,0} ragged-all-to-all(%rows.1, %none.1, %n, %n, %n, /*index=5*/%n), replica_groups={{0,1},{2,3}}
  %start = ((bf16[8,256]{1,0}, bf16[6,256]{1,0}, s64[2]{0}, s64[2]{0}, s64[2]{0}, /*index=5*/s64[2]{0}), bf16[6,256]{1,0}) ragged-all-to-all-start(%x, %none, %n, %n, %n, /*index=5*/%n), replica_groups={{0,1},{2,3}}
  ROOT %done = bf16[6,256]{1,0} ragged-all-to-all-done(%start)
}
"""  # noqa: E501


def test_a_ragged_exchange_counts_the_smaller_of_both_arrays():
    """The operand of one, the result of the other, as TPU's and GPU's compilers write them."""
    found = collectives(RAGGED, num_devices=4)
    assert [(one.kind, one.num_bytes, one.groups) for one in found] == [
        ("ragged-all-to-all", 2 * 6 * 256, ((0, 1), (2, 3)))
    ] * 2


def test_a_ragged_exchange_without_a_name_has_that_of_the_loop_around_it():
    """XLA for GPUs drops its name; other collectives have none then."""
    loop = """
ENTRY %whole (x: f32[4]) -> f32[4] {
  %loop = (f32[4]{0}) while(%x), condition=%c, body=%main, metadata={op_name="jit(f)/F/while"}
}
"""
    gather = "  %all = pred[7]{0} all-gather(%q), replica_groups={{0,1},{2,3}}\n}"
    found = collectives(RAGGED.replace("ENTRY ", "").replace("\n}", "\n" + gather) + loop, num_devices=4)
    assert [(one.kind, one.path) for one in found] == [
        ("ragged-all-to-all", ("jit", "f", "F", "while")),
        ("ragged-all-to-all", ("jit", "f", "F", "while")),
        ("all-gather", ()),
    ]
