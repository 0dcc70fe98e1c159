"""Which models of transformers do more with an attention mask than hand it on, found by reading their code.

The backend's masks are a few integers. A layer that passes them to its backend needs no more; one that adds them to its
scores itself, or counts their zeros, would compute nonsense. No attribute of a model says which it does, so its source
is read: the classes that a model's constructors name, and in those every use of a mask that is more than a hand-over or
a question for None.
"""

import ast
import functools
import inspect
import math
import re
import sys

import torch

EDITED = set()  # configurations of models that edit their masks


def look_at_model(model, config, names):
    """ValueError for a model that would misread the backend's masks; a
    model that edits its masks is added to ``EDITED``.

    names: those of the backends, for the message. transformers looks into the code too, for no attribute of a model
    says what its layers do with their masks.
    """
    calls_backend, edits_masks = _use_of_masks(model)
    if edits_masks and not calls_backend:
        raise ValueError(
            f"attn_implementation is one of {', '.join(names)}, and the attention of {model.__name__} is its own code, "
            f"which calls no "
            "backend; want 'eager' or 'sdpa' for it"
        )
    if edits_masks:
        EDITED.add(config)


@functools.cache
def _use_of_masks(model):
    """(whether the code of a model's class calls a backend, whether a
    part of the model edits a mask made by transformers)."""
    code = _code_of(model)
    if any(map(_has_table_of_attentions, code.values())):
        return False, True
    if not any(map(_makes_masks, code.values())):
        return True, False
    files = {made.__module__ for made in model.__mro__ if made in code}
    attention = {name: part for file in files for name, part in _definitions(file).items() if "Attention" in name}
    return not attention or any(map(_calls_backend, attention.values())), any(
        _edits_masks(*item) for item in code.items()
    )


def _code_of(model):
    """{class: its definition} of a model's class, of its parents and of the modules that their constructors name.

    A model within it that has a configuration of another kind is looked at by itself.
    """
    from transformers import PreTrainedModel

    code, todo = {}, [model]
    while todo:
        made = todo.pop()
        if not isinstance(made, type) or not issubclass(made, torch.nn.Module) or made in (PreTrainedModel, *code):
            continue
        if (
            issubclass(made, PreTrainedModel)
            and not issubclass(model, made)
            and made.config_class is not model.config_class
        ):
            continue
        if (definition := _definitions(made.__module__).get(made.__name__)) is None:
            continue
        code[made] = definition
        todo += made.__bases__
        names = vars(sys.modules[made.__module__])
        for method in _methods(definition):
            if method.name == "__init__":
                for node in ast.walk(method):
                    named = names.get(node.id) if isinstance(node, ast.Name) else None
                    todo += named.values() if isinstance(named, dict) else [named]  # some choose a class from a table
    return code


@functools.cache
def _definitions(module):
    """{name: definition} of the classes of a module that has a source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):  # made in a notebook
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _methods(definition):
    return [node for node in definition.body if isinstance(node, ast.FunctionDef)]


def _calls_backend(code):
    return any(
        isinstance(node, ast.Name) and node.id in ("ALL_ATTENTION_FUNCTIONS", "AttentionInterface")
        for node in ast.walk(code)
    )


def _has_table_of_attentions(code):
    """Whether a class of its own is chosen by the name of the attention, which is in no such table."""
    return any(
        isinstance(node, ast.Subscript) and getattr(node.slice, "attr", None) == "_attn_implementation"
        and not getattr(node.value, "id", "").startswith("ALL_") for node in ast.walk(code)
    )  # fmt: skip


def _makes_masks(code):
    """Whether a piece of code names one of transformers' functions that make masks."""
    names = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(code))
    return any(re.fullmatch(r"create_\w*masks?(_\w*)?", name) for name in names)


_NAMES_OF_MASKS = ("attention_mask", "causal_mask", "mask", "padding_mask")
_WANTS_WHOLE_MASKS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")


def _edits_masks(made, definition):
    """Whether a class does more with a mask than hand it on and ask whether it is None, or asks for one that is whole.

    The mask is an argument of a layer, or what a function of transformers made.
    """
    from transformers import PreTrainedModel

    if "Embedding" in made.__name__:  # counts a caller's real tokens
        return False
    for method in _methods(definition):
        nodes = list(ast.walk(method))
        if any(getattr(node, "attr", None) == "softmax" for node in nodes) and _calls_backend(definition):
            continue  # its own attention, beside the backends
        masks = {}  # name: the line that makes it
        if not issubclass(made, PreTrainedModel) and not _makes_masks(method):  # whose arguments are a caller's masks
            masks = {node.arg: 0 for node in nodes if isinstance(node, ast.arg) and node.arg in _NAMES_OF_MASKS}
        harmless = set()
        for node in nodes:
            # a keyword, or its name in a dict
            if getattr(node, "arg", getattr(node, "value", None)) in _WANTS_WHOLE_MASKS:
                return True
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Call)
            ):
                if _makes_masks(node.value.func):
                    masks.setdefault(node.targets[0].id, node.end_lineno)
            elif isinstance(node, ast.Call) and _is_call_of_layer(node.func):
                harmless.update(node.args, (keyword.value for keyword in node.keywords))
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
                harmless.add(node.left)
            elif isinstance(node, ast.IfExp):
                harmless.update((node.body, node.orelse))
            elif isinstance(node, ast.Dict):
                harmless.update(node.values)
            elif isinstance(node, ast.Return):
                harmless.update((node.value, *getattr(node.value, "elts", ())))
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in harmless:
                if node.lineno > masks.get(node.id, math.inf):
                    return True
    return False


def _is_call_of_layer(function):
    """Whether a function that is called is a plain name, or comes from self: not torch's, and no method of a tensor."""
    plain = isinstance(function, ast.Name)
    while isinstance(function, (ast.Attribute, ast.Subscript, ast.Call)):
        function = function.func if isinstance(function, ast.Call) else function.value
    return plain or isinstance(function, ast.Name) and function.id in ("self", "super")
