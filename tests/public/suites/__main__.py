"""Runs test suites of released packages with autopar in the place of `jax.jit`, and prints what fails so alone.

``python -m tests.public.suites --out build/suites [NAME ...]`` takes suites out of installed wheels, or out of sdists
that pip downloads, or out of ``--sources DIRECTORY``, which has a checkout of a package in the folder of its name;
nothing of them is copied into this repository. Tests that fail run again under `jax.jit`. The exit code is 1 where one
that passes there has no explanation in `EXPLAINED`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: Few devices, whose programs wait long for each other: a machine of two cores runs them one after another. Programs
#: run once or twice, so that LLVM's optimizations would take most of the time. Both ways run so.
_FLAGS = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_collective_call_terminate_timeout_seconds=1200 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600 --xla_backend_optimization_level=0"
)


@dataclass(frozen=True)
class Suite:
    """Tests of a package.

    Args:
        package: its name at the registry.
        module: the folder that has the tests, in the wheel or in the sdist.
        is_wheel: whether the wheel has them; else the sdist of the version that is installed.
        pattern: of the test files.
        left_out: parts of paths of files that are left out.
    """

    package: str
    module: str
    is_wheel: bool
    pattern: str
    left_out: tuple[str, ...] = ()


SUITES = {
    "optax": Suite("optax", "optax", True, "*_test.py", ("contrib", "sharding_test", "doctest")),
    "chex": Suite("chex", "chex", True, "*_test.py", ("fake_test", "pytypes")),
    "distrax": Suite("distrax", "distrax", True, "*_test.py"),
    "rlax": Suite("rlax", "rlax", True, "*_test.py"),
    "flax": Suite("flax", "tests", False, "*_test.py", ("tensorboard", "summary", "import", "checkpoint")),
    "equinox": Suite("equinox", "tests", False, "test_*.py", ("test_callback",)),
    "lineax": Suite("lineax", "tests", False, "test_*.py"),
    "optimistix": Suite("optimistix", "tests", False, "test_*.py"),
    "diffrax": Suite("diffrax", "test", False, "test_*.py"),
    "jax": Suite("jax", "tests", False, "*_test.py"),
}

_COMPOSITE = "looks in the program's text for a composite by its operand, which has another name inside of shard_map"
_OWN_DTYPE = "a dtype of private classes of jax, whose values the test puts on one device alone: a TraceError"
_NUMBER = "wants an error of jit for a Python number whose value is needed; it is a constant of the program here"
_PLACE = "wants the result on the devices that the function names; it lies on those of the plan"
_DISPATCH = "counts or reads caches, traces, transfers, logs or texts of jax's own dispatch"
_STATIC = "wants an error of jit for a leaf that is no array; it is a static value here"
_WORDS = "wants other words of an error that has jit's type"
_LENIENT = "wants an error of jit where autopar runs"
_ORDERED = "an ordered effect, which is on one device: a TraceError, as docs/coming-from.md says"


def _jax_tests(file: str, reasons: dict[str, str]) -> dict[str, str]:
    """By test of jax the reason.

    Args:
        file: of the tests.
        reasons: by "CLASS::TEST" the reason.
    """
    return {f"jax_tests/{file}::{test}": reason for test, reason in reasons.items()}


#: By test that fails under autopar alone the reason.
EXPLAINED: dict[str, str] = {
    "chex/_src/asserts_internal_test.py::IsTraceableTest::test_is_traceable__with_jit": "reads the name of jit's type",
    "chex/_src/asserts_test.py::AssertMaxTracesTest::test_incorrect_ordering": "reads the name of jit's type",
    **{
        f"equinox_tests/test_jit.py::test_buffer_donation_{how}": "asks for the address of an array that lies split"
        for how in ("function", "function_except_first", "method")
    },
    **{
        f"flax_tests/nnx/{test}": "flax's hijax variables, which are no arrays: a TraceError"
        for test in (
            "integration_test.py::TestIntegration::test_example_mutable_arrays",
            *(
                f"mutable_array_test.py::{name}"
                for name in (
                    "TestOptimizer::test_optimize_hijax",
                    "TestHijaxVariables::test_hijax_and_pytree",
                    "TestHijaxVariables::test_hijax_dynamic_structure",
                    "TestHijaxVariables::test_hijax_rngs",
                    "TestHijaxVariables::test_pytree_value",
                    "TestHijaxVariables::test_variable_to_hijax",
                    "TestHijaxVariables::test_variable_to_hijax_clean",
                )
            ),
        )
    },
    "flax_tests/nnx/mutable_array_test.py::TestVariableRefMode::test_object": (
        "returns a mutable reference: a TraceError"
    ),
    "equinox_tests/test_debug.py::test_backward_nan": _ORDERED,
    "optax/transforms/_accumulation_test.py::AccumulationTest::test_multi_steps": (
        "compares to the bit a loss, in float32, of parameters that lie split with one of parameters that do not"
    ),
    **_jax_tests(
        "python_callback_test.py",
        {f"PythonCallbackTest::test_exception_in_callback_{kind}": _DISPATCH for kind in ("pure", "io_unordered")},
    ),
    **_jax_tests(
        "lax_control_flow_test.py",
        {f"LaxControlFlowTest::test_scan_{what}_concrete_error": _NUMBER for what in ("length", "unroll")},
    ),
    **_jax_tests(
        "lax_test.py",
        {
            **{
                f"CompositeTest::test_composite{which}": _COMPOSITE
                for which in (
                    "",
                    "_attribute_dtypes",
                    "_decorator",
                    "_with_attributes",
                    "_with_jit_function",
                    "_with_non_default_version",
                    "_with_variadic_input_output",
                )
            },
            **{
                f"CustomElementTypesTest::test_{which}": _OWN_DTYPE
                for which in (
                    *("dynamic_slice", "equality", "gather", "jit_multiple_primitives", "scan_jaxpr", "scan_lowering"),
                    *(f"scatter{k}" for k in range(4)),
                    *("select", "slice", "transpose", "vmap"),
                )
            },
            "LaxTest::test_shape_as_value_handles_polymorphic_shapes": "exports symbolic shapes: a TraceError",
            **{
                f"LaxTest::testDotAlgorithm{k}": "allows a rounding of float16 for four terms, which are added up split"
                for k in (4, 6)
            },
            "RaggedTest::test_ragged_dot_out_sharding": _PLACE,
            "RaggedTest::test_ragged_dot_general_out_sharding": _PLACE,
        },
    ),
    **_jax_tests(
        "lax_numpy_test.py",
        {
            **{
                f"LaxBackedNumpyTests::test{which}": _NUMBER
                for which in (
                    *("AbstractionErrorMessage", "ArangeConcretizationError", "C_", "Mgrid", "Ogrid", "R_"),
                    *("SplitTypeError", "ZerosShapeErrors", "_tri_bug_22751"),
                )
            },
            "LaxBackedNumpyTests::test_zeros_like_with_explicit_device_and_jitted": _PLACE,
            **{
                f"LaxBackedNumpyTests::testArrayCopy{k}": "asks for the address of an array that lies split"
                for k in range(10)
            },
        },
    ),
    **_jax_tests(
        "debug_nans_test.py",
        {
            "DebugNaNsTest::testDebugNansInput": _WORDS,
            "DebugNaNsTest::testDebugNansZeroDiv": _WORDS,
            "DebugInfsTest::testDebugNansDoesntReturnDeoptimizedResult": _WORDS,
        },
    ),
    **_jax_tests(
        "mutable_array_test.py",
        {
            **{
                test: "closes over a mutable reference: a TraceError"
                for test in (
                    *(f"MutableArrayTest::test_closed_over_{which}" for which in ("basic0", "nested0", "nested1")),
                    *("MutableArrayTest::test_basic_aot_closure", "MutableArrayTest::test_grad_jit_readonly_2"),
                    "MutableArrayTest::test_jit_vjp_systematic_readonly0",
                    "MutableArrayTest::test_scan_closed_over_mut_array0",
                    "MutableArrayTest::test_scan_scanned_mut_array0",
                    "MutableArrayTest::test_sharding_persists",
                    "MutableArrayErrorsTest::test_closure_and_argument_aliases_jit",
                    "MutableArrayErrorsTest::test_cond_both_branches_close_over_same_mutable_array1",
                )
            },
            "MutableArrayErrorsTest::test_argument_aliases_custom_vjp_fwd1": _WORDS,
            "MutableArrayErrorsTest::test_argument_aliases_custom_vjp_primal1": _LENIENT,
            "MutableArrayErrorsTest::test_argument_aliases_jit": _LENIENT,
            **{
                f"MutableArrayErrorsTest::test_return_from_{which}": "returns a mutable reference: a TraceError"
                for which in ("jit", "jit_arg")
            },
        },
    ),
    **_jax_tests(
        "linalg_test.py",
        {
            test: "allows a rounding of 1e-6 in float32 between two ways to compile"
            for test in ("LaxLinalgTest::testPascal0", "ScipyLinalgTest::testRsf2csf0")
        },
    ),
    **_jax_tests("lax_numpy_indexing_test.py", {"IndexingTest::testDynamicIndexingWithSlicesErrors0": _NUMBER}),
    **_jax_tests(
        "custom_linear_solve_test.py", {"CustomLinearSolveTest::test_custom_linear_solve_ordered_effects": _ORDERED}
    ),
    **_jax_tests("nn_test.py", {"NNFunctionsTest::testOneHotConcretizationError": _NUMBER}),
    **_jax_tests(
        "api_test.py",
        {
            **{
                test: reason
                for reason, tests in {
                    _NUMBER: (
                        *("APITest::test_abstract_error_message", "APITest::test_cast_int", "APITest::test_casts"),
                        *("APITest::test_list_index_err", "APITest::test_no_double_dots_in_error_message"),
                        *("APITest::test_range_err", "APITest::test_switch_value_jit"),
                    ),
                    _STATIC: (
                        *("APITest::test_bad_input", "APITest::test_returned_non_jaxtype"),
                        *("JitTest::test_jit_bad_input", "JitTest::test_trivial_computations_with_tokens"),
                    ),
                    _WORDS: (
                        *("APITest::test_escaped_tracer_omnistaging", "JitTest::test_jit_of_noncallable"),
                        "JitTest::test_intersecting_static_and_donate_argnames",
                        "JitTest::test_jit_lower_compile_arg_type_mismatch",
                        "JitTest::test_jit_lower_compile_in_tree_mismatch",
                        "JitTest::test_jit_lower_compile_trivial_in_tree_mismatch",
                        "JitTest::test_jit_lower_compile_vmap",
                        "JitTest::test_jit_of_generator",
                        "JitTest::test_static_argnum_on_static_method_is_not_supported",
                        "JitTest::test_cpp_jit_raises_on_non_hashable_static_argnum",
                        "JitTest::test_jit_raises_on_first_invocation_on_non_hashable_static_argnum",
                    ),
                    _LENIENT: (
                        *("JitTest::test_double_donation", "JitTest::test_jit_of_nonweakreferenceable_function"),
                        *(
                            "JitTest::test_staticmethod_is_not_supported",
                            "JitTest::test_donate_argnames_signature_fail",
                        ),
                    ),
                    _DISPATCH: (
                        *("JitTest::test_cache_key_defaults", "JitTest::test_jit_global_cache"),
                        *("JitTest::test_jit_lower_no_pruning", "JitTest::test_jit_replica_attributes"),
                        *("JitTest::test_jit_repr", "JitTest::test_jit_repr_errors"),
                        *(f"JitTest::test_jit_with_pruned_args{k}" for k in range(3)),
                        *("JitTest::test_pe_close_jaxpr_cache_leak", "JitTest::test_static_args_equality"),
                        *("APITest::test_clear_cache", "APITest::test_eval_shape_trace_cache_share"),
                        *("APITest::test_inner_jit_function_retracing", "APITest::test_user_trace_context_hooks"),
                        *("APITest::test_internal_device_put_with_device", "TracebackTest::test_jit_traceback"),
                        "RematTest::test_remat_partial_cse_prevention",
                        "RematTest::test_remat_partial_cse_prevention_pytree",
                        *(
                            f"APITest::test_cache_miss_explanations_{which}"
                            for which in (
                                *("first_miss", "new_function_in_loop", "other_dtype", "other_in_tree", "other_shape"),
                                *("other_tracing_config", "other_weak_type"),
                            )
                        ),
                    ),
                    _PLACE: ("JitTest::test_jit_default_platform", "JitTest::test_trivial_computations"),
                    "positions and names of static arguments that are both given are one set": (
                        "JitTest::test_jit_with_mismatched_static_argnames",
                    ),
                    "exports a decorated function: a TraceError": (
                        "OverrideLoweringTest::test_sharding_constraint_as_noop",
                    ),
                    "returns a token: a TraceError": ("APITest::test_jit_returning_token",),
                }.items()
                for test in tests
            },
        },
    ),
    **_jax_tests(
        "random_test.py",
        {f"KeyArrayTest::test_cpp_dispatch_{which}": _DISPATCH for which in ("normal", "split")},
    ),
}


def files_of(suite: Suite, out: Path, sources: Path | None) -> tuple[Path, list[Path]]:
    """The folder that tests are named from, and the files. Sdists are downloaded once."""
    if suite.is_wheel:
        spec = find_spec(suite.module)
        assert spec is not None and spec.origin is not None, f"{suite.package} is not installed"
        folder = Path(spec.origin).parent
        root = folder.parent
    else:
        found = sources / suite.package if sources is not None else _unpacked(suite.package, out)
        root = out / "taken"
        folder = root / f"{suite.package}_tests"  # by this name: a package named `tests` is this repository's
        shutil.copytree(found / suite.module, folder, dirs_exist_ok=True)
    files = sorted(p for p in folder.rglob(suite.pattern) if not any(part in str(p) for part in suite.left_out))
    return root, files


def _unpacked(package: str, out: Path) -> Path:
    """The folder of the sdist of the version that is installed."""
    asked = f"{package}=={version(package)}"
    folder = out / "sdists" / asked
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", asked]
        subprocess.run([*pip, "--dest", str(out / "sdists")], check=True)
        stem = f"{package.replace('-', '_')}-{version(package)}"
        with tarfile.open(out / "sdists" / f"{stem}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return next(p for p in folder.iterdir() if p.is_dir())


@dataclass(frozen=True)
class Limits:
    """What of a suite runs.

    Args:
        out: the folder of reports.
        seconds: that one test may take.
        minutes: that a suite may take; what has not run by then is left out.
        files: parts of the paths of the files that run, one of which a path has: "A,B".
        sources: a folder with a checkout of a package in the folder of its name; None takes sdists.
    """

    out: Path
    seconds: int
    minutes: float
    files: str
    sources: Path | None = None


def run(suite: Suite, mode: str, limits: Limits, tests: Sequence[str] = ()) -> dict[str, Any]:
    """What the plugin wrote of a run of a suite, or of some of its tests; of one that ended what it had found.

    Args:
        suite: the suite.
        mode: "jit" or "autopar".
        limits: of the run.
        tests: those that run; all where there are none.
    """
    out = limits.out
    root, files = files_of(suite, out, limits.sources)
    parts = limits.files.split(",")
    chosen = [str(root / t) for t in tests] or [str(f) for f in files if any(part in str(f) for part in parts)]
    if not chosen:  # pytest would take the tests of this folder
        raise FileNotFoundError(f"no test file of {suite.package} with {limits.files!r} in its path is below {root}")
    written = out / f"{suite.package}-{mode}.json"
    environment = {
        **os.environ,
        "AUTOPAR_SUITE": mode,
        "AUTOPAR_SUITE_OUT": str(written),
        "AUTOPAR_CACHE_DIR": "off",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip(),
    }
    written.unlink(missing_ok=True)
    options = ["-q", "-p", "tests.public.suites.replace", "-p", "no:randomly", "-p", "no:cacheprovider", "-W", "ignore"]
    options += [
        "-c",
        os.devnull,
        "--rootdir",
        str(root),
        "--continue-on-collection-errors",
        "--timeout",
        str(limits.seconds),
    ]
    with open(out / f"{suite.package}-{mode}.log", "w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "pytest", *options, *chosen]
        try:
            code = subprocess.run(command, env=environment, stdout=log, timeout=60 * limits.minutes).returncode
        except subprocess.TimeoutExpired:
            code = 0
    found: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {"outcomes": {}}
    return {"functions": 0, "calls": 0, "split": 0, **found, "ended": code < 0}


def only_with_autopar(plain: dict[str, str], replaced: dict[str, str]) -> dict[str, str]:
    """Tests that pass under `jax.jit` and fail under autopar, with their errors."""
    return {
        test: outcome
        for test, outcome in sorted(replaced.items())
        if outcome.startswith("failed") and plain.get(test) == "passed"
    }


def is_explained(test: str) -> bool:
    """Whether it is known why a test fails under autopar alone; of ordered callbacks their names tell."""
    of_callbacks = test.startswith("jax_tests/python_callback_test.py::")
    return test in EXPLAINED or (of_callbacks and "_io_ordered" in test)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.public.suites", description=__doc__)
    parser.add_argument("names", nargs="*", default=sorted(SUITES), help=f"of {', '.join(sorted(SUITES))}")
    parser.add_argument("--out", type=Path, default=Path("build/suites"))
    parser.add_argument("--seconds", type=int, default=300, help="that one test may take")
    parser.add_argument("--minutes", type=float, default=600, help="that a suite may take; the rest is left out")
    parser.add_argument("--files", default="", help="parts of the paths of the files that run: A,B")
    parser.add_argument("--sources", type=Path, help="folder with a checkout of a package in the folder of its name")
    asked = parser.parse_args()
    limits = Limits(asked.out, asked.seconds, asked.minutes, asked.files, asked.sources)
    asked.out.mkdir(parents=True, exist_ok=True)
    print("| suite | tests that pass | functions | calls through autopar | programs that split | failures |")
    print("|---|---|---|---|---|---|")
    unexplained: dict[str, str] = {}
    for name in asked.names:
        suite = SUITES[name]
        replaced = run(suite, "autopar", limits)
        outcomes = replaced["outcomes"]
        if replaced["ended"]:
            unexplained[f"{name}: the process"] = f"ended by a signal after {len(outcomes)} tests"
        failed = [test for test, outcome in outcomes.items() if outcome.startswith("failed")]
        plain = run(suite, "jit", limits, failed)["outcomes"] if failed else {}
        failures = only_with_autopar(plain, outcomes)
        passed = sum(outcome == "passed" for outcome in outcomes.values())
        counts = f"{replaced['functions']} | {replaced['calls']} | {replaced['split']} | {len(failures)}"
        print(f"| {suite.package} {version(suite.package)} | {passed} | {counts} |", flush=True)
        unexplained |= {test: error for test, error in failures.items() if not is_explained(test)}
    for test, error in unexplained.items():
        print(f"{test}: {error}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
