"""Evaluates expressions in LaTeX or plain text, and tells whether two are the same number or function.

Rational numbers are exact. Any other number is a complex float. An expression with variables is represented by its values at six
points, and two expressions are the same if these values agree to twelve digits. That needs no algebra system, and is right for
polynomials, roots and elementary functions, except by an unlikely accident. Functions are compared over the reals: sqrt(x^2) is |x|,
not x.

The calculator (`environments.calculator`) uses the same `ArithmeticGrammar`, for rational numbers alone.
"""

import cmath
import math
import re
from fractions import Fraction
from typing import Any

Number = Fraction | complex

TOKEN = re.compile(r"\s*(\d+\.\d+|\.\d+|\d+|\\[A-Za-z]+|\\[{}|%]|[A-Za-z]+|\*\*|[-+*/^!()\[\]{}|,_=<>])")
FUNCTIONS = {
    "sqrt": cmath.sqrt, "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "ln": cmath.log, "log": cmath.log, "exp": cmath.exp,
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan, "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x), "cot": lambda x: 1 / cmath.tan(x),
    "abs": lambda x: complex(abs(x)),
}  # fmt: skip
CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j, "infty": complex(math.inf), "infinity": complex(math.inf)}
GREEK = {"alpha", "beta", "gamma", "delta", "theta", "phi", "varphi", "lambda", "mu", "omega", "sigma", "tau", "rho", "epsilon"}
# Where functions are compared: of both signs, none of them special.
POINTS = ((1.37, 0.61), (-0.83, 1.9), (2.71, -1.13), (-1.57, -2.29), (0.43, 3.07), (-3.19, 0.27))
# Integers are exact up to so many bits; beyond, a power is a float or none at all.
MOST_BITS = 4096


class NoExpression(ValueError):
    """The text is no expression."""


class ArithmeticGrammar:
    """The grammar of arithmetic, read by recursive descent. ** binds tightest and to the right, as in Python:

        sum: product (("+" | "-") product)*      product: signed (("*" | "/") signed)*      signed: ("-" | "+") signed | power
        power: factor [("^" | "**") signed]      factor: number | "(" sum ")"

    A subclass defines the computation (`binary`, `raised`, `number`) and may add rules.
    """

    # Parentheses and signs inside each other.
    deepest = 50
    mistake: type[ValueError] = NoExpression

    def __init__(self, tokens: list[str]):
        self.tokens, self.at, self.depth = tokens, 0, 0

    def whole(self) -> Any:
        """Returns the value of the whole expression.

        Raises:
            ValueError: the tokens are no expression. The type of the error is `mistake`.
        """
        value = self.sum()
        if self.at < len(self.tokens):
            raise self.mistake(f"`{self.tokens[self.at]}` where a sign or the end belongs")
        return value

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *tokens: str) -> str | None:
        """Consumes and returns the next token if it is one of these; otherwise returns None."""
        if self.peek() in tokens:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def need(self, token: str) -> None:
        if not self.take(token):
            raise self.mistake("a parenthesis is not closed")

    def sum(self) -> Any:
        value = self.product()
        while sign := self.take("+", "-"):
            value = self.binary(sign, value, self.product())
        return value

    def product(self) -> Any:
        value = self.signed()
        while sign := self.take("*", "/"):
            value = self.binary(sign, value, self.signed())
        return value

    def signed(self) -> Any:
        self.depth += 1
        if self.depth > self.deepest:
            raise self.mistake(f"more than {self.deepest} parentheses or signs inside each other")
        sign = self.take("-", "+")
        value = self.power() if sign is None else self.signed()
        self.depth -= 1
        return self.binary("-", Fraction(0), value) if sign == "-" else value

    def power(self) -> Any:
        base = self.factor()
        return self.raised(base, self.signed()) if self.take("^", "**") else base

    def factor(self) -> Any:
        if self.take("("):
            value = self.sum()
            self.need(")")
            return value
        token = self.peek()
        if not token:
            raise self.mistake("a number is missing at the end")
        if not is_number(token):
            raise self.mistake(f"`{token}` where a number belongs")
        self.at += 1
        return self.number(token)

    def number(self, token: str) -> Any:
        return Fraction(token)

    def binary(self, sign: str, a: Any, b: Any) -> Any:
        return _binary(sign, a, b)

    def raised(self, base: Any, exponent: Any) -> Any:
        return _power(base, exponent)


class _Parser(ArithmeticGrammar):
    """Evaluates an expression at one point. Beside arithmetic it reads LaTeX, products without a sign, variables, functions, factorials
    and absolute values in bars."""

    def __init__(self, text: str, point: tuple[float, float]):
        super().__init__(_tokens(text))
        self.point, self.bars = point, 0

    def product(self) -> Number:
        value = self.signed()
        while True:
            if sign := self.take("*", "/", "\\cdot", "\\times", "\\div"):
                value = _binary("/" if sign in ("/", "\\div") else "*", value, self.signed())
            elif self.begins():
                if is_number(self.peek()) and is_number(self.tokens[self.at - 1]):
                    raise NoExpression("two numbers side by side")
                value = _binary("*", value, self.power())
            else:
                return value

    def begins(self) -> bool:
        """Whether a factor begins here, so that a product without a sign continues."""
        token = self.peek()
        if token == "|":
            return not self.bars
        return bool(token) and (token[0].isalnum() or token[0] == "." or token in ("(", "{", "[") or self.is_command(token))

    def is_command(self, token: str) -> bool:
        name = token[1:]
        return token.startswith("\\") and (name in FUNCTIONS or name in CONSTANTS or name in GREEK or name in ("frac", "binom"))

    def factor(self) -> Number:
        return self.factorial(self.atom())

    def factorial(self, value: Number) -> Number:
        while self.take("!"):
            if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 300:
                raise NoExpression("!")
            value = Fraction(math.factorial(int(value)))
        return value

    def atom(self) -> Number:
        token = self.peek()
        self.at += 1
        if is_number(token):
            return self.mixed(Fraction(token)) if "." not in token else Fraction(token)
        if token in ("(", "{", "["):
            value = self.sum()
            self.need({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token == "|":
            self.bars += 1
            value = self.sum()
            self.need("|")
            self.bars -= 1
            return abs(value) if isinstance(value, Fraction) else complex(abs(value))
        return self.named(token.removeprefix("\\"))

    def mixed(self, whole: Fraction) -> Number:
        """Adds the fraction of plain numbers that follows a whole number, as in 2\\frac{1}{3}. Without a fraction, returns the
        number."""
        at = self.at
        if self.take("\\frac"):
            part = self.fraction()
            if isinstance(part, Fraction) and 0 < part < 1 and self.plain(at + 1, self.at):
                return whole + part
            self.at = at
        return whole

    def plain(self, start: int, end: int) -> bool:
        return all(token.isdigit() or token in "{}" for token in self.tokens[start:end])

    def fraction(self) -> Number:
        above = self.argument()
        return _binary("/", above, self.argument())

    def argument(self) -> Number:
        """Reads the argument of a command: an expression in braces, or a single digit or letter."""
        token = self.peek()
        if token.isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        if self.take("{"):
            value = self.sum()
            self.need("}")
            return value
        if self.peek().isdigit():
            self.at += 1
            return Fraction(self.tokens[self.at - 1])
        return self.atom()

    def named(self, name: str) -> Number:
        if name == "frac":
            return self.fraction()
        if name == "binom":
            n, k = self.argument(), self.argument()
            if isinstance(n, Fraction) and isinstance(k, Fraction) and n.denominator == k.denominator == 1 and 0 <= k <= n <= 1000:
                return Fraction(math.comb(int(n), int(k)))
            raise NoExpression("binom")
        if name in FUNCTIONS:
            return self.function(name)
        if name in CONSTANTS:
            return CONSTANTS[name]
        if len(name) == 1 or name in GREEK:
            index = self.subscript()
            return complex(_variable(name + index, self.point))
        raise NoExpression(name or "the end")

    def subscript(self) -> str:
        if not self.take("_"):
            return ""
        start = self.at
        self.argument()
        return "_" + "".join(token for token in self.tokens[start : self.at] if token not in "{}")

    def function(self, name: str) -> Number:
        degree: Number = Fraction(2)
        if name == "sqrt" and self.take("["):
            degree = self.sum()
            self.need("]")
        base: Number | None = self.argument() if name == "log" and self.take("_") else None
        exponent = self.argument() if name != "sqrt" and self.take("^") else None
        x = self.argument() if self.peek() in ("{", "(") or name == "sqrt" else self.power()
        if name == "sqrt":
            return _root(x, degree)
        value: Number = _finite(FUNCTIONS[name](complex(x)))
        if base is not None:
            value = _finite(value / cmath.log(complex(base)))
        return _power(value, exponent) if exponent is not None else value


def _tokens(text: str) -> list[str]:
    """Splits a text into tokens. One or two letters that are no known name become variables.

    Raises:
        NoExpression: the text is empty, or has a word of three or more letters or an unknown character.
    """
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise NoExpression(text[at])
        token, at = match[1], match.end()
        if not token.isalpha() or token in FUNCTIONS or token in CONSTANTS:
            tokens.append(token)
        elif len(token) <= 2:
            tokens += token
        else:
            raise NoExpression(token)
    if not tokens:
        raise NoExpression("nothing")
    return tokens


def is_number(token: str) -> bool:
    """Whether a token begins as a number does."""
    return token[:1].isdigit() or token[:1] == "."


def _variable(name: str, point: tuple[float, float]) -> float:
    """Returns the value of a variable at a point. Each name has another value."""
    number = sum(ord(letter) * 31**i for i, letter in enumerate(name)) % 9973
    return point[0] + point[1] * number / 9973


def _binary(sign: str, a: Number, b: Number) -> Number:
    try:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__}[sign](b)
        x, y = complex(a), complex(b)
        # An infinite real number times a real one: complex multiplication would make it NaN.
        if sign in "*/" and x.imag == y.imag == 0:
            return complex(x.real * y.real if sign == "*" else x.real / y.real)
        return x + y if sign == "+" else x - y if sign == "-" else x * y if sign == "*" else x / y
    except (ZeroDivisionError, OverflowError):
        raise NoExpression("no number") from None


def _power(base: Number, exponent: Number) -> Number:
    try:
        if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
            size = max(base.numerator.bit_length(), base.denominator.bit_length())
            if size * abs(exponent) <= MOST_BITS:
                return base ** int(exponent)
        if isinstance(base, Fraction) and isinstance(exponent, Fraction) and base >= 0 and exponent.numerator == 1:
            return _root(base, Fraction(exponent.denominator))
        return _finite(complex(base) ** complex(exponent))
    except (ZeroDivisionError, OverflowError):
        raise NoExpression("no number") from None


def _root(x: Number, degree: Number) -> Number:
    """Computes a root, which is exact where it is rational. An odd root of a negative number is real."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or degree < 1:
        raise NoExpression("sqrt")
    n = int(degree)
    if isinstance(x, Fraction) and x >= 0:
        above, below = (round(float(part) ** (1 / n)) if part < 10**300 else -1 for part in (x.numerator, x.denominator))
        if above >= 0 and below > 0 and n < 100 and above**n == x.numerator and below**n == x.denominator:
            return Fraction(above, below)
    value = complex(x)
    if n % 2 and value.imag == 0 and value.real < 0:
        return complex(-((-value.real) ** (1 / n)))
    return _finite(cmath.sqrt(value) if n == 2 else value ** (1 / n))


def _finite(value: complex) -> complex:
    if cmath.isnan(value):
        raise NoExpression("no number")
    return value


def values(text: str) -> list[Number]:
    """Evaluates an expression at each of `POINTS`.

    Raises:
        NoExpression: the text is no expression, or has no value at a point.
    """
    numbers: list[Number] = []
    for point in POINTS:
        try:
            numbers.append(_Parser(text, point).whole())
        except (ValueError, OverflowError, ZeroDivisionError, RecursionError) as error:
            raise NoExpression(str(error)) from None
    return numbers


def nearly_equal(a: Number, b: Number, decimal: bool = False) -> bool:
    """Whether two numbers are the same. Rational numbers are compared exactly, other numbers to twelve digits.

    Args:
        decimal: whether one of the numbers is a decimal, which may be rounded. Numbers are then compared to six decimal places, or to
            six digits if they are below 1.
    """
    if isinstance(a, Fraction) and isinstance(b, Fraction) and (a == b or not decimal):
        return a == b
    try:
        x, y = complex(a), complex(b)
    except OverflowError:
        return False
    if cmath.isinf(x) or cmath.isinf(y):
        return x == y
    return abs(x - y) <= 1e-12 * max(abs(x), abs(y)) + (1e-6 * min(1.0, abs(y)) if decimal else 1e-13)


def equivalent(a: str, b: str) -> bool:
    """Whether two expressions are the same number, or the same function.

    Raises:
        NoExpression: a text is no expression.
    """
    xs, ys = values(a), values(b)
    decimal = "." in a or "." in b
    return all(nearly_equal(x, y, decimal) for x, y in zip(xs, ys, strict=True))
