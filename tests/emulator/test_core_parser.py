"""What the parser takes and refuses: errors name the line and quote it, and nothing crashes."""

import collections

import numpy as np
import pytest

import emulator
from emulator.core_kernels import HEADER, expect_fault, module

ERRORS = [
    ("unsupported", "unknown instruction 'frob.b32'", "frob.b32 r0, r1;"),
    ("unsupported", "unknown modifier '.tepid'", "add.tepid.s32 r0, r1, r2;"),
    ("unsupported", "unknown modifier '.v3'", "ld.global.v3.b32 r0, [%out];"),
    ("unsupported", "lacks a type", "add r0, r1, r2;"),
    ("unsupported", "vector operand and .v do not match", "ld.global.v2.b32 r0, [%out];"),
    ("unsupported", "a vector of 3 for .v2", "ld.global.v2.b32 {r0, r1, r2}, [%out];"),
    ("unsupported", "unknown comparison", "setp.lo.s32 p0, r0, r1;"),
    ("unsupported", "unknown special register '%tid.w'", "mov.u32 r0, %tid.w;"),
    ("unsupported", "multiple of 8", "setmaxnreg.inc.sync.aligned.u32 30;"),
    ("parse", "takes 3 operands; got 2", "add.s32 r0, r1;"),
    ("parse", "has 64 bits, the instruction's type '.s32' has 32", "add.s32 r0, d1, r2;"),
    ("parse", "is not a predicate", "selp.b32 r0, r1, r2, r3;"),
    ("parse", "unknown name 'nothing'", "mov.u32 r0, nothing;"),
    ("parse", "unknown label 'AWAY'", "bra AWAY;"),
    ("parse", "does not fit type '.u16'", "add.u16 h0, h1, 70000;"),
    ("parse", "an integer constant cannot be of type '.f32'", "add.f32 r0, r1, 1;"),
    ("parse", "destination is not a register", "add.s32 5, r1, r2;"),
    ("parse", "'_' is not a destination", "add.s32 _, r1, r2;"),
    ("parse", "expected ';'", "add.s32 r0, r1, r2 ret;"),
    ("parse", "malformed floating-point literal", "mov.b32 r0, 0f12;"),
    ("parse", "malformed number", "mov.b32 r0, 12abc;"),
    ("parse", "is not a predicate register", "@r0 ret;"),
    ("parse", "function without an end", "{ ret;"),
    ("unsupported", "unknown directive '.frob'", ".frob 3;"),
    ("unsupported", "unknown type '.f8'", ".reg .f8 x;"),
    ("parse", "defined twice", "X: ret; X: ret;"),
    ("parse", "is not a table", "brx.idx r0, r1;"),
]


@pytest.mark.parametrize(("fault", "text", "body"), ERRORS, ids=[e[2] for e in ERRORS])
def test_errors_quote_the_line(fault: str, text: str, body: str) -> None:
    with expect_fault(fault, text) as caught:
        emulator.load(module(body))
    if "without an end" not in text:
        assert body.split(";")[0].split(":")[0] in caught.verdict.text
        assert caught.verdict.line == module(body).split("\n").index(caught.verdict.text) + 1


def test_a_whole_module_of_directives() -> None:
    text = f"""{HEADER}
    /* a comment
       of two lines */ // and one
    .file 1 "kernel.py", 123, 456
    .extern .shared .align 1024 .b8 dynamic[];
    .global .align 16 .b8 table[4][2] = {{{{1, 2}}, {{3, 4}}}};
    .visible .const .align 4 .f32 numbers[] = {{1.5, 0f40000000}};
    .func (.param .b32 r) helper(.param .b32 a);
    .weak .entry first(.param .u64 .ptr .global .align 16 out, .param .align 8 .b8 blob[24], .param .f32 scale)
    .maxntid 128, 1, 1 .minnctapersm 2 .maxnreg 64
    {{ .pragma "nounroll"; .reg .pred %p<3>; .reg .b64 %rd<4>; .reg .f32 %f1, %f2;
       .loc 1 10 2, function_name $L__info_string0, inlined_at 1 3 1
       ld.param.b64 %rd1, [out]; ld.param.f32 %f1, [scale]; ld.const.f32 %f2, [numbers+4]; add.rn.f32 %f1, %f1, %f2;
       st.global.f32 [%rd1], %f1; ret; }}
    .func (.param .b32 r) helper(.param .b32 a) {{ ret; }}
    .visible .entry second() {{ ret; }}
    .section .debug_str {{ .b8 1, 2, 3 {{ }} }}
    """
    program = emulator.load(text)
    assert set(program.entries) == {"first", "second"}
    assert program.entries["first"].params == ((0, 8, 8), (8, 24, 8), (32, 4, 4))
    out = np.zeros(1, np.float32)
    program.launch("first", grid=(1, 1, 1), block=(1, 1, 1), params=[out, bytes(24), np.float32(5)])
    assert out[0] == 7
    with pytest.raises(ValueError, match="entry must be one of first, second"):
        program.launch(grid=(1, 1, 1), block=(1, 1, 1))


def test_literals() -> None:
    body = """mov.b32 r0, 0x1F; mov.b32 r1, 0b101; mov.b32 r2, 017; mov.b32 r3, -1; mov.b32 r4, 4294967295U;
    mov.f32 r5, 0f3F800000; mov.f32 r6, -2.5; mov.b64 d0, -2; mov.b32 r7, WARP_SZ; mov.f64 d1, 0d4000000000000000;
    st.global.v4.b32 [%out], {r0, r1, r2, r3}; st.global.v4.b32 [%out+16], {r4, r5, r6, r7};
    st.global.v2.b64 [%out+32], {d0, d1};"""
    out = np.zeros(12, np.uint32)
    emulator.load(module(body)).launch(grid=(1, 1, 1), block=(1, 1, 1), params=[out])
    want = [31, 5, 15, 2**32 - 1, 2**32 - 1, 0x3F800000, 0xC0200000, 32, 2**32 - 2, 2**32 - 1, 0, 0x40000000]
    np.testing.assert_array_equal(out, np.array(want, np.uint64).astype(np.uint32))


def _mutants(text: str, count: int, seed: int):
    """The text with characters, tokens and lines deleted, doubled, exchanged or replaced."""
    rng = np.random.default_rng(seed)
    junk = [*"{}[]();,.:@!|+-%_<>\"'/\\\0\n 09afx", "\x7f", "é", ".reg .b32", "0f", "0x", "/*", "//"]
    for _ in range(count):
        at, size = int(rng.integers(len(text))), int(rng.integers(1, 30))
        kind = int(rng.integers(4))
        piece = text[at : at + size]
        if kind == 0:
            yield text[:at] + text[at + size :]
        elif kind == 1:
            yield text[:at] + piece + text[at:]
        elif kind == 2:
            yield text[:at] + str(junk[int(rng.integers(len(junk)))]) + text[at + 1 :]
        else:
            other = int(rng.integers(len(text)))
            yield text[:at] + text[other : other + size] + text[at + size :]


FUZZED = module(
    """.reg .b32 x<4>; .shared .align 16 .b8 s[64]; ts: .branchtargets A, B; @p0 bra A; brx.idx r0, ts;
    A: { .reg .pred p; setp.lt.and.s32 p|p1, r0, -5, !p2; selp.b64 d0, d1, 7, p; } mov.b64 {r1, _}, d0;
    B: ld.global.v4.b32 {r0, r1, r2, r3}, [%out+16]; st.shared.v2.b64 [s+8], {d0, d1}; fma.rn.f32x2 d2, d1, d0, d2;
    mbarrier.try_wait.parity.shared::cta.b64 p3, [r1+8], 1; cvt.rn.bf16x2.f32 r2, r0, r1; bar.sync 1, 64;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [r1], [d1, {r2, r3}], [r4];
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {r0, r1}, [r2]; call.uni (x1), f, (x2);""",
    before=".func (.param .b32 r) f(.param .b32 a) { ret; }",
).replace("call.uni (x1), f, (x2);", "{ .param .b32 a, b; call.uni (a), f, (b); }")


def _outcome(text: str) -> str:
    try:
        emulator.load(text)
    except emulator.Verdict as verdict:
        return verdict.fault
    return "taken"


def test_the_fuzzed_module_is_legal() -> None:
    emulator.load(FUZZED)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_modules_give_verdicts_not_crashes(seed: int) -> None:
    outcomes = collections.Counter(_outcome(text) for text in _mutants(FUZZED, 400, seed))
    assert set(outcomes) == {"taken", "parse", "unsupported"}, outcomes
