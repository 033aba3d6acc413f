"""A tool that computes exactly: sums, differences, products, quotients, powers and parentheses of whole and decimal numbers.

    calculate("2 * (3 + 4) ** 2")     98
    calculate("1 / 3")                1/3, which is 0.333333333333
    calculate("0.1 + 0.2")            0.3

The tool runs no code. Expressions are parsed by a grammar (`rl.expressions.ArithmeticGrammar`). Their length and the numbers in them
are bounded.
"""

import re
from fractions import Fraction

from argosy.rl.expressions import ArithmeticGrammar

TOKEN = re.compile(r"\s*(?:(\d[\d,_]*\.?\d*|\.\d+)|(\*\*|[-+*/()^×÷−]))")
# Of an expression, and of a number's digits.
MOST_CHARACTERS, MOST_DIGITS = 1000, 1000
SAME = {"^": "**", "×": "*", "÷": "/", "−": "-"}


def calculate(expression: str) -> str:
    """Computes an expression exactly, such as 2 * (3 + 4).

    Args:
        expression: numbers with + - * / ** and parentheses.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters, above {MOST_CHARACTERS}")
    return number_text(Calculation(tokens_of(expression)).whole())


def tokens_of(expression: str) -> list[str]:
    """Splits an expression into numbers and signs.

    Raises:
        ValueError: the expression contains anything else.
    """
    tokens, at, text = [], 0, expression.rstrip().removesuffix("=")
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"`{text[at:].strip()[:20]}` is no number and no sign")
        number, sign = match.groups()
        tokens.append(SAME.get(sign, sign) if number is None else re.sub("[,_]", "", number))
        at = match.end()
    if not tokens:
        raise ValueError("an empty expression")
    return tokens


class Calculation(ArithmeticGrammar):
    """Evaluates an expression of rational numbers, and refuses numbers that are too long to be written."""

    mistake = ValueError

    def number(self, token: str) -> Fraction:
        return check_digits(Fraction(token))

    def binary(self, sign: str, a: Fraction, b: Fraction) -> Fraction:
        if sign == "/" and b == 0:
            raise ZeroDivisionError("division by zero")
        return check_digits(a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b)

    def raised(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise ValueError(f"the exponent {number_text(exponent)} is not whole")
        if base == 0 and exponent < 0:
            raise ZeroDivisionError("division by zero")
        digits = abs(exponent.numerator) * max(len(str(abs(base.numerator))), len(str(base.denominator)))
        if abs(base) != 1 and base != 0 and digits > 2 * MOST_DIGITS:
            raise ValueError(f"a result of more than {MOST_DIGITS} digits")
        if abs(base) == 1 or base == 0:
            exponent = Fraction(exponent.numerator % 2 if base else min(exponent.numerator, 1))
        return check_digits(base**exponent.numerator)


def check_digits(value: Fraction) -> Fraction:
    """Returns the value unchanged if it is short enough to be written.

    Raises:
        ValueError: the value is too long.
    """
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_DIGITS * 3.33:
        raise ValueError(f"a result of more than {MOST_DIGITS} digits")
    return value


def number_text(value: Fraction) -> str:
    """Writes a number as a whole number or a decimal if it is exactly one, and otherwise as a fraction with its first decimals."""
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
