"""What a notebook shows where a recorded row is missing: one sentence in place of a traceback, and it goes on."""

import ast
import sys

from ladder.lab.results import NotRecorded


def install(shell):
    """Let cells that need a row that is not recorded, or what such a cell would have computed, say so and end there."""
    if getattr(shell.run_code, "says_what_is_missing", False):
        return
    run_code, cell, never_made = shell.run_code, [""], {}

    def lacks(error):
        return isinstance(error, NotRecorded) or isinstance(error, NameError) and error.name in never_made

    def say(shell, kind, error, trace, tb_offset=None):
        if not lacks(error):
            return shell.showtraceback((kind, error, trace), tb_offset)
        why = str(error) if isinstance(error, NotRecorded) else never_made[error.name]
        never_made.update(dict.fromkeys(assigned(cell[0]) - set(shell.user_ns), why))
        if isinstance(error, NotRecorded):
            print(why)
        else:
            print(f"This cell needs `{error.name}`, which an earlier cell did not compute. {why}")

    async def run(code, result=None, **options):
        failed = await run_code(code, result, **options)
        if failed and result is not None and lacks(result.error_in_exec):
            result.error_in_exec = None  # the sentence is all there is to say, and the next cell may run
        return failed

    run.says_what_is_missing = True
    shell.events.register("pre_run_cell", lambda info: cell.__setitem__(0, info.raw_cell))
    shell.set_custom_exc((NotRecorded, NameError), say)
    shell.run_code = run


def assigned(source):
    """The names that a cell gives a value, in whatever statement."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell with magic; it is not one that reads the record
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def install_here():
    """``install`` in the notebook that imports this package; nothing where there is none."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        install(ipython.get_ipython())
