"""Source code to look at: a function highlighted, two rungs side by side, and the Hopper kernel without a GPU."""

import difflib
import html
import inspect
import io
import re
import textwrap
import tokenize
from pathlib import Path

import ipywidgets as ipw
from IPython.display import Markdown

from ladder.chapters import plots
from ladder.chapters.explorer import Explorer
from ladder.lab.cells import OURS

_TOKENS = re.compile(
    r"(?P<comment>#.*)"
    r"|(?P<string>[rfb]*\"\"\"[\s\S]*?\"\"\"|[rfb]*\"(?:\\.|[^\"\\\n])*\"|[rfb]*'(?:\\.|[^'\\\n])*')"
    r"|(?P<keyword>\b(?:def|return|for|in|if|else|elif|while|not|and|or|is|None|True|False|import|from|raise|with|as|lambda|class|pass|try|except)\b)"
    r"|(?P<decorator>^\s*@[\w.]+)"
    r"|(?P<number>\b\d[\d_.e]*\b)",
    re.MULTILINE,
)
_COLOURS = {
    "comment": "var(--jp-mirror-editor-comment-color, #408080)",
    "string": "var(--jp-mirror-editor-string-color, #a02020)",
    "keyword": "var(--jp-mirror-editor-keyword-color, #006000)",
    "decorator": "var(--jp-mirror-editor-meta-color, #7040c0)",
    "number": "var(--jp-mirror-editor-number-color, #006080)",
}
_PRE = "margin:0;font-family:var(--jp-code-font-family, monospace);line-height:1.35;font-size:12.5px;overflow-x:auto;white-space:pre"  # noqa: E501


def highlight(code):
    """Python source as HTML spans, one colour a kind of token; the same text whatever packages are installed."""
    done, last = [], 0
    for match in _TOKENS.finditer(code):
        kind, text = match.lastgroup, html.escape(match.group(), quote=False)
        weight = ";font-weight:600" if kind == "keyword" else ";font-style:italic" if kind == "comment" else ""
        span = "\n".join(f'<span style="color:{_COLOURS[kind]}{weight}">{line}</span>' for line in text.split("\n"))
        done += [html.escape(code[last : match.start()], quote=False), span]
        last = match.end()
    return "".join(done) + html.escape(code[last:], quote=False)


def source_of(thing, *, docstring=False):
    """Source text of a function or a ``triton.jit`` kernel; ``docstring`` keeps its docstring."""
    function = inspect.unwrap(getattr(thing, "fn", thing))
    code = textwrap.dedent(inspect.getsource(function))
    return code if docstring else _without_docstrings(code)


def _without_docstrings(code):
    """The code without strings that stand alone as statements."""
    lines, drop, previous = code.splitlines(keepends=True), set(), tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT):
            drop.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.DEDENT):
            previous = token.type
    return "".join(line for number, line in enumerate(lines, start=1) if number not in drop)


def where(thing):
    """ "ladder/step02_tiled/attention.py: attention": where a function's source stands."""
    function = inspect.unwrap(getattr(thing, "fn", thing))
    return f"{function.__module__.replace('.', '/')}.py: {function.__name__}"


class Source:
    """Functions of the package as a notebook shows them: highlighted, their docstrings left in the file."""

    def __init__(self, *things, docstring=False):
        self.things, self.docstring = things, docstring

    def __repr__(self):
        return "source of " + ", ".join(where(thing) for thing in self.things)

    def _repr_html_(self):
        blocks = []
        for thing in self.things:
            code = highlight(source_of(thing, docstring=self.docstring).rstrip())
            blocks.append(
                f'<div style="border-left:4px solid {plots.BLUE};padding:2px 10px;margin:6px 0"><b>{where(thing)}</b>'
                f'<pre style="{_PRE}">{code}</pre></div>'
            )
        return "".join(blocks)


def diff_lines(old, new):
    """[(sign, old line or None, new line or None)] of two sources; sign is " ", "-", "+" or "~" for a replaced line."""
    old, new = (
        source_of(x).rstrip().split("\n") if not isinstance(x, str) else x.rstrip().split("\n") for x in (old, new)
    )
    lines = []
    for tag, i0, i1, j0, j1 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            lines += [(" ", a, b) for a, b in zip(old[i0:i1], new[j0:j1])]
            continue
        pairs = min(i1 - i0, j1 - j0)
        lines += [("~", a, b) for a, b in zip(old[i0 : i0 + pairs], new[j0 : j0 + pairs])]
        lines += [("-", a, None) for a in old[i0 + pairs : i1]]
        lines += [("+", None, b) for b in new[j0 + pairs : j1]]
    return lines


class RungDiff(Explorer):
    """What changed from one rung's function to the next: unified or side by side.

    Args:
        old, new: functions (or kernels) of two rungs.
    """

    title = "diff"
    OLD, NEW = ("rgba(230,159,0,.25)", "rgba(0,114,178,.20)")  # orange and blue, and a sign, for colour-blind readers

    def __init__(self, old, new):
        super().__init__()
        self.old, self.new = old, new
        self.lines = diff_lines(old, new)
        self.style = ipw.ToggleButtons(
            options=["unified", "side by side", "changes only"], style={"button_width": "110px"}
        )
        self.body = ipw.HTML()
        self.style.observe(self._show, "value")
        self.children = [self.style, self.body]
        self._show()

    @property
    def changed(self):
        """How many lines of the new source are not in the old one."""
        return sum(sign in "+~" for sign, _, _ in self.lines)

    def _show(self, change=None):
        self.body.value = (
            self.side_by_side()
            if self.style.value == "side by side"
            else self.unified(self.style.value == "changes only")
        )

    def _head(self):
        gone = sum(sign in "-~" for sign, _, _ in self.lines)
        return (
            f'<div><span style="background:{self.OLD}">&minus; {where(self.old)}</span> &nbsp; '
            f'<span style="background:{self.NEW}">+ {where(self.new)}</span> &nbsp; {gone} lines out, {self.changed} '
            f'in</div>'
        )

    def unified(self, changes_only=False):
        """One column; removed lines before the lines that replace them."""
        rows, held = [], []
        for sign, a, b in [*self.lines, (" ", "", "")]:
            if sign == " ":
                rows += held
                held = []
                if not changes_only:
                    rows.append(self._line("&nbsp;", a, None))
                continue
            if a is not None:
                rows.append(self._line("&minus;", a, self.OLD))
            if b is not None:
                held.append(self._line("+", b, self.NEW))
        return f'{self._head()}<pre style="{_PRE}">{"".join(rows)}</pre>'

    def side_by_side(self):
        """Two columns, lines that correspond beside each other."""
        rows = []
        for sign, a, b in self.lines:
            left, right = (("" if x is None else x) for x in (a, b))
            shade = (self.OLD if sign in "-~" else None), (self.NEW if sign in "+~" else None)
            cells = "".join(
                f'<td style="text-align:left;vertical-align:top;padding:0 '
                f'6px;{f"background:{colour}" if colour else ""}">'
                f'<pre style="{_PRE};font-size:11.5px;white-space:pre-wrap">{highlight(line)}</pre></td>'
                for line, colour in zip((left, right), shade)
            )
            rows.append(f"<tr>{cells}</tr>")
        return f'{self._head()}<table style="width:100%;table-layout:fixed">{"".join(rows)}</table>'

    @staticmethod
    def _line(sign, line, colour):
        shade = f' style="background:{colour}"' if colour else ""
        return f"<span{shade}>{sign} {highlight(line)}</span>\n"

    def __repr__(self):
        return f"diff of {where(self.old)} and {where(self.new)}: {self.changed} lines new"

    def fallback(self):
        return {"text/html": self.unified()}, {}


def _functions(file):
    """{name: (docstring, source, file)} of the functions in a file of
    step 08: read, not imported, so that no GPU is needed."""
    import ast

    path = Path(__file__).resolve().parents[1] / OURS / file
    text = path.read_text() if path.exists() else ""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: (ast.get_docstring(node), ast.get_source_segment(text, node), file) for node in nodes}


def _hopper_functions():
    """``_functions`` of the files that make the Hopper kernel of prefill."""
    found = {}
    for name in ("barriers", "work", "softmax", "prefill_kernel"):
        found |= _functions(f"hopper/{name}.py")
    return found


def hopper_code(*names):
    """What some functions of the Hopper kernel say of themselves, as a Markdown table."""
    found = _hopper_functions()
    if not found:
        return Markdown(
            "*The Hopper kernel is not part of this checkout: step 08 runs its portable kernel everywhere.*"
        )
    lines = [f"| `{name}` | {' '.join((found[name][0] or '').split())} |" for name in names]
    return Markdown("\n".join(["| function | what it does |", "|:--|:--|", *lines]))


class HopperSource:
    """The source of one function of the Hopper kernel, highlighted."""

    def __init__(self, name):
        _, self.code, self.file = _hopper_functions()[name]
        self.name = name

    def __repr__(self):
        return f"source of ladder/{OURS}/{self.file}: {self.name}"

    def _repr_html_(self):
        return (
            f'<div style="border-left:4px solid {plots.BLUE};padding:2px 10px;margin:6px '
            f'0"><b>ladder/{OURS}/{self.file}: {self.name}</b>'
            f'<pre style="{_PRE}">{highlight(_without_docstrings(self.code + chr(10)).rstrip())}</pre></div>'
        )
