"""The machine code of W1 to W4 has the shape that was last looked at: a change of it is noticed, and then wanted."""

from __future__ import annotations

import pytest

from bench import kernel_shape

HOW = "if the change is wanted, run `python -m bench.kernel_shape --update` and commit bench/baseline.json"


@pytest.mark.parametrize("workload", ["W1", "W2", "W3", "W4", "store"])
def test_hot_loops_are_those_of_the_baseline(workload: str) -> None:
    changed = kernel_shape.differences("x86-64-v3", kernel_shape.shapes("x86-64-v3", [workload]), [workload])
    assert not changed, "\n".join(["the emitted code has another shape:", *changed, HOW])


ASSEMBLY = """\
	.type	group,@function
group:
	pushq	%rbx
	testq	%rsi, %rsi
	je	.LBB0_5
	xorl	%eax, %eax
.LBB0_2:
	xorl	%ecx, %ecx
.LBB0_3:
	vmovdqu	(%rsi,%rcx), %ymm0
	vpaddq	32(%rdi), %ymm0, %ymm0
	vmovdqu	%ymm0, (%rdx,%rcx)
	addq	$1, 8(%rdi)
	cmpq	%rcx, (%r9)
	prefetcht0	64(%rsi)
	jne	.LBB0_3
	callq	*%r8
	incq	%rax
	cmpq	%rax, %r10
	jne	.LBB0_2
.LBB0_5:
	popq	%rbx
	retq
.Lfunc_end0:
"""


def test_the_shape_of_assembly() -> None:
    assert kernel_shape.shape(ASSEMBLY) == {
        "instructions": 18, "widest_bits": 256, "calls": 1,
        "loops": ["7 instructions, 256 bits, 4 loads, 2 stores, 1 prefetches"],
    }


def test_a_lost_vector_width_is_named() -> None:
    found = kernel_shape.shapes("x86-64-v3", ["W4"])
    narrow = {name: {**facts, "widest_bits": 128} for name, facts in found.items()}
    assert any("widest_bits" in line for line in kernel_shape.differences("x86-64-v3", narrow, ["W4"]))
