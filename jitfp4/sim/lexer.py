"""PTX text to tokens."""

from __future__ import annotations

import re
from typing import NamedTuple

from jitfp4.errors import SimParseError

_TOKEN = re.compile(
    r"""
    \s*(?:
    (?P<word>[%$A-Za-z_][\w$]*(?:(?:\.|::)\w+)*)
  | (?P<line>\.(?:version|target|address_size|file|loc)\b[^\n]*)
  | (?P<section>\.section\s+\.debug\w*\s*\{[^}]*\})
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
  | (?P<int>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<punct>[@!{}()\[\]<>,;:|+\-=*/&~^?])
  | (?P<end>\Z)
    )
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """``kind`` is a group name of the grammar; ``line`` is a directive with the rest of its line, ``section`` is a
    whole one for debuggers. ``start`` and ``end`` slice the source.
    """

    kind: str
    text: str
    line: int
    start: int
    end: int


def tokenize(source: str) -> list[Token]:
    """The tokens of a PTX file, without blanks and comments, closed by one ``end`` token."""
    tokens: list[Token] = []
    line, counted, position = 1, 0, 0
    while match := _TOKEN.match(source, position):
        kind = str(match.lastgroup)
        start, position = match.span(kind)
        line, counted = line + source.count("\n", counted, start), start
        if kind != "comment":
            tokens.append(Token(kind, match[kind], line, start, position))
        if kind == "end":
            return tokens
    position = len(source) - len(source[position:].lstrip())
    line += source.count("\n", counted, position)
    raise SimParseError(f"PTX line {line}: unexpected character {source[position]!r}")


class Cursor:
    """A position in the tokens of a PTX file."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = tokenize(source)
        self.at = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        found = self.tokens[self.at].text == text
        self.at += found
        return found

    def expect(self, text: str) -> Token:
        if self.token.text != text:
            raise self.error(f"expected {text!r}")
        return self.next()

    def error(self, message: str, token: Token | None = None) -> SimParseError:
        token = token or self.token
        return SimParseError(f"PTX line {token.line}: {message}, at {token.text!r}")

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "int":
            raise self.error("expected an integer", token)
        return sign * int(token.text.rstrip("U"), 0)

    def offset(self) -> int:
        """``+4``, ``-4`` or ``+-4``, any number of times."""
        total = 0
        while self.token.text in ("+", "-"):
            self.accept("+")
            total += self.integer()
        return total
