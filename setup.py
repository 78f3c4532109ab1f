"""Builds the C++ CPU kernels, which are optional: without a compiler penjing installs and runs on torch."""

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """Compiles the files side by side and puts the library in place by renaming: a running process keeps its own."""

    def build_extension(self, ext: Extension) -> None:
        compile_files = self.compiler.compile  # one file after the other
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

            def side_by_side(sources, **settings):
                each = pool.map(lambda source: compile_files([source], **settings), sources)
                return [path for paths in each for path in paths]

            self.compiler.compile = side_by_side
            super().build_extension(ext)

    def copy_file(self, infile, outfile, *args, **kwargs):  # type: ignore[override]
        temporary = f"{outfile}.{os.getpid()}.partial"
        shutil.copy2(infile, temporary)
        os.replace(temporary, outfile)
        return outfile, 1


def kernels() -> list[Extension]:
    if platform.system() != "Linux":  # futex, madvise
        return []
    return [
        Extension(
            "penjing.kernels.cpu._cpu",
            # Those of one instruction set take longest and come first.
            sources=sorted(map(str, Path("kernels/cpu").glob("*.cpp")), key=lambda path: ("/ops_" not in path, path)),
            depends=sorted(str(path) for path in Path("kernels/cpu").glob("*.h")),
            # No contraction: the order of roundings is part of the result. No errno: square roots stay inline.
            extra_compile_args=[
                *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0"),
                *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12 warns about its own AVX-512 headers
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels})
