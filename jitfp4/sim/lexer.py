"""PTX text to tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jitfp4.errors import SimParseError

_TOKEN = re.compile(
    r"""
    (?P<newline>\n)
  | (?P<space>[ \t\r\f\v]+|//[^\n]*|/\*.*?\*/)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
  | (?P<int>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<word>[%$A-Za-z_][\w$]*(?:(?:\.|::)\w+)*)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<punct>[@!{}()\[\]<>,;:|+\-=*/&~^?])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """``kind`` is a group name of the grammar, or ``end``. ``start`` and ``end`` slice the source."""

    kind: str
    text: str
    line: int
    start: int
    end: int


def tokenize(source: str) -> list[Token]:
    """The tokens of a PTX file, without blanks and comments, closed by one ``end`` token."""
    tokens: list[Token] = []
    position, line = 0, 1
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            raise SimParseError(f"PTX line {line}: unexpected character {source[position]!r}")
        kind, text = str(match.lastgroup), match.group()
        if kind not in ("newline", "space"):
            tokens.append(Token(kind, text, line, position, match.end()))
        line += text.count("\n")
        position = match.end()
    tokens.append(Token("end", "", line, len(source), len(source)))
    return tokens


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
        if self.token.text == text and self.token.kind != "end":
            self.at += 1
            return True
        return False

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
