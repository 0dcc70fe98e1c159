"""Explorers of the chapters: ipywidgets that redraw when a control moves, and a still picture where no kernel runs.

Every explorer is a VBox whose controls, ``picture`` and ``readout`` are attributes, so that code can drive it:
``explorer.step.value = 4`` moves it as a reader would. A committed notebook keeps only the still.
"""

import html
import math
import re

import ipywidgets as ipw

from ladder.chapters import plots

VIEW = "application/vnd.jupyter.widget-view+json"


class Explorer(ipw.VBox):
    """Controls, a picture and a readout. Subclasses set controls, then call ``start``, and implement ``draw``."""

    title = "explorer"

    def start(self, *rows):
        """Lay out rows of controls, redraw when one changes, draw once."""
        self.picture = ipw.Image(
            format="png", layout=ipw.Layout(max_width="100%"), width=round(plots.WIDTH * plots.SHOWN_DPI)
        )
        self.readout = ipw.HTML()
        for row in rows:
            for control in row:
                control.observe(self.redraw, "value")
        boxes = [ipw.HBox(row, layout=ipw.Layout(flex_flow="row wrap")) for row in rows]
        self.children = [*boxes, self.picture, self.readout]
        self.redraw()

    def draw(self):
        """(figure, readout text) for the controls as they stand."""
        raise NotImplementedError

    def redraw(self, change=None):
        figure, text = plots.styled(self.draw)()
        self.picture.value = plots.png(figure)
        self.readout.value = f'<div style="max-width: 760px">{text}</div>'

    def still(self):
        """The picture with its readout as a caption, as PNG bytes."""
        figure, text = plots.styled(self.draw)()
        return plots.png(
            plots.caption(figure, html.unescape(re.sub(r"<br>", "\n", re.sub(r"</?(?!br)[^>]*>", "", text))))
        )

    def __repr__(self):
        return f"{self.title} (run the cell to drive it)"

    def _repr_mimebundle_(self, include=None, exclude=None, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        fallback, about = self.fallback()
        return {**data, "text/plain": repr(self), **fallback}, {**metadata, **about}

    def fallback(self):
        """MIME types, and their metadata, for whoever has no running kernel."""
        return {"image/png": self.still()}, {"image/png": {"width": round(plots.WIDTH * plots.SHOWN_DPI)}}


def slider(description, value, low, high, step=1, **options):
    """An integer or float slider in the house layout."""
    kind = ipw.IntSlider if all(isinstance(x, int) for x in (value, low, high, step)) else ipw.FloatSlider
    return kind(
        value=value, min=low, max=high, step=step, description=description,
        style={"description_width": "initial"}, layout=ipw.Layout(width=options.pop("width", "360px")), **options,
    )  # fmt: skip


def choice(description, options, value=None):
    """A dropdown in the house layout."""
    labels = [o[0] if isinstance(o, tuple) else str(o) for o in options]
    values = [o[1] if isinstance(o, tuple) else o for o in options]
    return ipw.Dropdown(
        options=list(zip(labels, values)), value=values[0] if value is None else value, description=description,
        style={"description_width": "initial"}, layout=ipw.Layout(width="max-content"),
    )  # fmt: skip


class PredictThenMeasure(Explorer):
    """A question with a number for an answer. The measurement shows beside the reader's prediction, never before it.

    Args:
        question: what to predict, one sentence.
        measured: the number; ``unit`` its unit.
        low, high: ends of the (logarithmic) slider.
        because: what explains the number, shown with it.
        source: where the number comes from.
    """

    title = "prediction"

    def __init__(self, question, measured, unit, *, low, high, because="", source=""):
        if not low <= measured <= high:
            raise ValueError(f"measured is {measured}; want it between low = {low} and high = {high}")
        super().__init__()
        self.question, self.measured, self.unit = question, float(measured), unit
        self.because, self.source, self.committed = because, source, None
        self.prediction = ipw.FloatLogSlider(
            value=math.sqrt(low * high), min=math.log10(low), max=math.log10(high), step=0.01, readout_format=".3g",
            description="my prediction", style={"description_width": "initial"}, layout=ipw.Layout(width="420px"),
        )  # fmt: skip
        self.reveal = ipw.Button(description="measure", button_style="primary", tooltip="show the measurement")
        self.reveal.on_click(self._commit)
        self.answer = ipw.HTML("<i>Move the slider, then press the button.</i>")
        asked = ipw.HTML(f"<b>Predict:</b> {self.question}")
        unit_label = ipw.Label(unit)
        self.children = [asked, ipw.HBox([self.prediction, unit_label, self.reveal]), self.answer]

    def _commit(self, button):
        self.committed = self.prediction.value
        ratio = self.committed / self.measured
        if 1 / 1.25 <= ratio <= 1.25:
            verdict = "within 25 %: your model of the machine holds here."
        else:
            verdict = f"{max(ratio, 1 / ratio):.2g} x too {'high' if ratio > 1 else 'low'}."
        longest = max(self.committed, self.measured)

        def bar(label, value, colour):
            width = max(1.0, 60 * value / longest)
            return (
                f'<tr><td style="text-align:right">{label}</td><td style="width:70%"><div style="display:inline-block;'
                f"vertical-align:middle;height:14px;width:{width:.1f}%;background:{colour}"
                f'"></div> {value:.3g} {self.unit}</td></tr>'
            )

        rows = bar("predicted", self.committed, plots.ORANGE) + bar("measured", self.measured, plots.BLUE)
        self.answer.value = (
            f'<table style="width:100%;max-width:760px">{rows}</table><p>{verdict} {self.because} {self._source()}</p>'
        )

    def _source(self):
        return f"<i>({self.source})</i>" if self.source else ""

    def __repr__(self):
        return f"Predict: {self.question}"

    def fallback(self):
        asked = f"<p><b>Predict:</b> {self.question}</p>"
        answer = f"<p><b>{self.measured:.3g} {self.unit}.</b> {self.because} {self._source()}</p>"
        return {"text/html": f"{asked}<details><summary>the measurement</summary>{answer}</details>"}, {}
