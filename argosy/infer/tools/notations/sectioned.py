"""The base of the notations of DeepSeek and Kimi K2: text, then a section between marks, with each call between marks."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from argosy.infer.tools.calls import CallScanner, MarkedNotation, ToolCall


class SectionedNotation(MarkedNotation):
    """A notation with calls in a section.

    section: the marks that open and close the section.
    single: the marks that open and close a call.
    between: the separator of calls, as it is written in a grammar.
    """

    section: ClassVar[tuple[str, str]]
    single: ClassVar[tuple[str, str]]
    between: ClassVar[str] = ""

    @abstractmethod
    def call(self, scan: CallScanner) -> ToolCall:
        """Consumes and returns the call at this position, after its opening mark.

        Raises:
            ValueError: there is no call.
        """

    @abstractmethod
    def opened(self, place: int, name: str) -> str:
        """A call of the function `name`, as it is written in a grammar, without the marks around it. Its arguments are the rule
        `arguments_{place}`."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        # Some completions have calls without a section around them.
        calls: list[ToolCall] = []
        content, scan, openings = "", CallScanner(text), [self.mark(name) for name in self.openings]
        while not scan.at_end():
            inside = scan.takes(self.mark(self.section[0]))
            calls += self._calls(scan)
            if inside and not (scan.takes(self.mark(self.section[1])) or scan.at_end()):
                raise ValueError("a section that does not end")
            content += scan.until(*openings)
        return content.strip(), calls

    def _calls(self, scan: CallScanner) -> list[ToolCall]:
        calls = []
        scan.blanks()
        while scan.takes(self.mark(self.single[0])):
            scan.blanks()
            calls.append(self.call(scan))
            scan.blanks()
            if not (scan.takes(self.mark(self.single[1])) or scan.at_end()):
                raise ValueError("a call that does not end")
            scan.blanks()
        return calls

    def rest(self, names: Sequence[str], many: bool) -> list[str]:
        begin, end = map(self.token, self.single)
        call_rule = f"{begin} call {end}"
        more = f" ({self.between}{call_rule})*" if many else ""
        return [
            *(f"call_{i}: {self.opened(i, name)}" for i, name in enumerate(names)),
            "call: " + " | ".join(f"call_{i}" for i in range(len(names))),
            f"rest: {call_rule}{more} {self.token(self.section[1])}",
        ]
