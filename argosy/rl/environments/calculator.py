"""A tool that computes exactly: sums, differences, products, quotients, powers and parentheses of whole and decimal numbers.

    calculate("2 * (3 + 4) ** 2")     98
    calculate("1 / 3")                1/3, which is 0.333333333333
    calculate("0.1 + 0.2")            0.3

It has a parser of its own and runs nothing. The grammar, ** binding tightest and to the right, as in Python:

    sum: product (("+" | "-") product)*      product: sign (("*" | "/") sign)*      sign: "-" sign | power      power: atom ["**" sign]
"""

import re
from fractions import Fraction

TOKEN = re.compile(r"\s*(?:(\d[\d,_]*\.?\d*|\.\d+)|(\*\*|[-+*/()^×÷−]))")
# Of an expression, of a number's digits, and of parentheses inside each other.
MOST_CHARACTERS, MOST_DIGITS, MOST_DEPTH = 1000, 1000, 50
SAME = {"^": "**", "×": "*", "÷": "/", "−": "-"}


def calculate(expression: str) -> str:
    """Computes an expression exactly, such as 2 * (3 + 4).

    Args:
        expression: numbers with + - * / ** and parentheses.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters, above {MOST_CHARACTERS}")
    return written(Reader(tokens_of(expression)).whole())


def tokens_of(expression: str) -> list[str]:
    """The numbers and signs of an expression.

    Raises:
        ValueError: there is something else in it.
    """
    found, at, text = [], 0, expression.rstrip().removesuffix("=")
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"`{text[at:].strip()[:20]}` is no number and no sign")
        number, sign = match.groups()
        found.append(SAME.get(sign, sign) if number is None else re.sub("[,_]", "", number))
        at = match.end()
    if not found:
        raise ValueError("an empty expression")
    return found


class Reader:
    """Reads an expression from its tokens."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.at, self.depth = tokens, 0, 0

    def whole(self) -> Fraction:
        value = self.sum()
        if self.at < len(self.tokens):
            raise ValueError(f"`{self.tokens[self.at]}` where a sign or the end belongs")
        return value

    def next(self, *signs: str) -> str | None:
        """The next token if it is one of these."""
        if self.at < len(self.tokens) and self.tokens[self.at] in signs:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def sum(self) -> Fraction:
        value = self.product()
        while sign := self.next("+", "-"):
            other = self.product()
            value = bounded(value + other if sign == "+" else value - other)
        return value

    def product(self) -> Fraction:
        value = self.sign()
        while sign := self.next("*", "/"):
            other = self.sign()
            if sign == "/" and other == 0:
                raise ZeroDivisionError("division by zero")
            value = bounded(value * other if sign == "*" else value / other)
        return value

    def sign(self) -> Fraction:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} parentheses or signs inside each other")
        sign = self.next("-", "+")
        value = self.power() if sign is None else -self.sign() if sign == "-" else self.sign()
        self.depth -= 1
        return value

    def power(self) -> Fraction:
        base = self.atom()
        if self.next("**") is None:
            return base
        exponent = self.sign()
        if exponent.denominator != 1:
            raise ValueError(f"the exponent {written(exponent)} is not whole")
        if base == 0 and exponent < 0:
            raise ZeroDivisionError("division by zero")
        digits = abs(exponent.numerator) * max(len(str(abs(base.numerator))), len(str(base.denominator)))
        if abs(base) != 1 and base != 0 and digits > 2 * MOST_DIGITS:
            raise ValueError(f"a result of more than {MOST_DIGITS} digits")
        if abs(base) == 1 or base == 0:
            exponent = Fraction(exponent.numerator % 2 if base else min(exponent.numerator, 1))
        return bounded(base**exponent.numerator)

    def atom(self) -> Fraction:
        if self.next("("):
            value = self.sum()
            if self.next(")") is None:
                raise ValueError("a parenthesis is not closed")
            return value
        if self.at == len(self.tokens):
            raise ValueError("a number is missing at the end")
        token = self.tokens[self.at]
        if not token[0].isdigit() and token[0] != ".":
            raise ValueError(f"`{token}` where a number belongs")
        self.at += 1
        return bounded(Fraction(token))


def bounded(value: Fraction) -> Fraction:
    """A value that is not too long to be written.

    Raises:
        ValueError: it is.
    """
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_DIGITS * 3.33:
        raise ValueError(f"a result of more than {MOST_DIGITS} digits")
    return value


def written(value: Fraction) -> str:
    """A number: whole or decimal where it is one; otherwise as a fraction, with its first decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    if rest == 1:
        places = max(twos, fives)
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    near = f", which is {float(value):.12g}" if 1e-300 < abs(value) < 1e300 else ""
    return f"{value.numerator}/{value.denominator}{near}"
