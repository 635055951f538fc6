"""Steps that are functions of the user's own, in a file whose text goes into the plan, so that every worker has the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.data.errors import PreparationError
from phalanx.data.steps.step import Document, Dropped


@dataclass(frozen=True)
class GivenFunction:
    """``use = "FILE.py:FUNCTION"``: a function from a ``Document`` to a ``Document`` or ``Dropped``."""

    use: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Given to the function by their names: ``parameters = {least = 3}``."""
    code: str = ""
    """The text of the file, which the plan enters."""

    def __call__(self, document: Document) -> Document | Dropped:
        try:
            result = self._function(document, **self.parameters)
        except Exception as error:
            raise PreparationError(
                f"step {self.use} on document {document.name}: {type(error).__name__}: {error}; mend it and plan again"
            ) from error
        if not isinstance(result, Document | Dropped):
            raise PreparationError(
                f"step {self.use} on document {document.name} gave {type(result).__name__}, not a Document or Dropped; mend it and plan again"
            )
        return result

    @cached_property
    def _function(self) -> Callable[..., object]:
        file, _, name = self.use.rpartition(":")
        scope: dict[str, object] = {"__name__": Path(file).stem, "__file__": file}
        exec(compile(self.code, file, "exec"), scope)
        found = scope.get(name)
        if not callable(found):
            raise PreparationError(
                f"step {self.use}: there is no function {name} in {file}; correct step.use"
            )
        try:
            inspect.signature(found).bind(Document("", ""), **self.parameters)
        except TypeError as error:
            raise PreparationError(
                f"step {self.use}: {name} of a document and step.parameters: {error}; correct one of them"
            ) from error
        return found


def with_code(step: GivenFunction, folder: Path) -> GivenFunction:
    """The step with the text of its file, which lies in ``folder``. Raises ``PreparationError`` if it has no such function."""
    file = folder / step.use.rpartition(":")[0]
    try:
        code = file.read_bytes().decode()
        complete = replace(step, code=code)
        _ = complete._function
    except PreparationError:
        raise
    except OSError as error:
        raise PreparationError(
            f"step {step.use}: cannot read {file}: {error.strerror}; correct step.use"
        ) from error
    except Exception as error:
        raise PreparationError(
            f"step {step.use}: {file} cannot be run: {type(error).__name__}: {error}; mend it"
        ) from error
    return complete
