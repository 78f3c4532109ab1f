"""dependencies.py PYPROJECT [EXTRA …]: print the requirements of a pyproject.toml, one a line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = [line for extra in sys.argv[2:] for line in project["optional-dependencies"][extra]]
print("\n".join(project["dependencies"] + extras))
