"""The token of an application, which proves at a sign-on who it is. No representation and no error holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from danube_fast.client.values.limits import TOKEN_CHARACTERS_MAX
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument

__all__ = ["Bearer"]


class Bearer:
    """Draws the token for each sign-on anew, from a text or a function."""

    __slots__ = ("_draw", "is_function")

    def __init__(self, token: Any) -> None:
        """Raises InvalidArgument, which does not repeat the token."""
        self.is_function = callable(token)
        """Whether each draw may bring another one."""
        if callable(token):
            self._draw: Callable[[], Any] = token
            return
        checked = _checked(token, "token=")
        self._draw = lambda: checked

    def draw(self) -> str:
        """Return the token for one sign-on. May block as long as the application's function does.

        Raises what that function raises, if that is a DanubeError, FailedPrecondition for other errors of it, and
        InvalidArgument if it returns no token.
        """
        try:
            found = self._draw()
        except DanubeError:
            raise
        except BaseException as error:  # in a thread of its own, where no one else would hear of it
            raise FailedPrecondition(
                f"the function token= raised {type(error).__name__}; see its cause, and mend the function"
            ) from error
        return _checked(found, "what token= returned")

    def __repr__(self) -> str:
        return "<Bearer>"


def _checked(token: Any, what: str) -> str:
    """Return what may stand in a header of HTTP. Raises InvalidArgument."""
    if not isinstance(token, str):
        raise InvalidArgument(
            f"{what} is of type {type(token).__name__}; give an API key or a JWT as text, or a plain function that "
            "returns one"
        )
    is_sound = token.isascii() and token.isprintable() and " " not in token
    if not token or not is_sound or len(token) > TOKEN_CHARACTERS_MAX:
        raise InvalidArgument(
            f"{what} is no API key and no JWT: those are a word of 1 to {TOKEN_CHARACTERS_MAX} ASCII characters "
            "without blanks or line ends; give it as it was issued"
        )
    return token
