"""Tables as Markdown: what a notebook displays where IPython is
installed, and plain text for programs where it is not."""

try:
    from IPython.display import Markdown
except ImportError:  # comes with the notebooks; the README's tables do not need it

    class Markdown:
        """Markdown text in ``data``, as IPython's class of this name has it."""

        def __init__(self, data):
            self.data = data

        def _repr_markdown_(self):
            return self.data


__all__ = ["Markdown"]
