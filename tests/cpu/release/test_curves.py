"""The curves of the page in a real browser."""

from __future__ import annotations

import json

from tests.support.browser import Browser
from tests.support.metrics import make_tracker
from tests.support.viewed_pages import write_page
from tests.support.viewed_runs import make_run

CLICK = """
    const [svg, left, top] = arguments, box = svg.getBoundingClientRect();
    const place = { clientX: box.left + left * box.width, clientY: box.top + top * box.height };
    svg.dispatchEvent(new MouseEvent("click", { bubbles: true, ...place }));
"""
LOOK = "const { stroke, strokeDasharray } = getComputedStyle(arguments[0]); return { stroke, strokeDasharray }"


def look_of(browser: Browser, selector: str) -> dict[str, str]:
    """Return how the first line of a selector is drawn."""
    return browser.run(LOOK, browser.all(selector)[0])


def test_curves_have_marks_and_lead_to_the_episodes(browser, page):
    browser.open(page)
    titles = browser.texts("figcaption")
    assert titles[:2] == ["reward/mean", "val/accuracy"] and "time/update" not in titles
    figure = "figure[data-metric='reward/mean']"
    assert len(browser.all(f"{figure} .curve")) == 1 and len(browser.all(f"{figure} .dot")) == 3
    assert len(browser.all(f"{figure} .mark.restart")) == 1 and len(browser.all(f"{figure} .mark.incident.job")) == 1
    assert len(browser.all(f"{figure} polygon.checkpoint")) == 3
    assert "out of memory" in browser.texts(f"{figure} .incident title")[0]
    browser.click("#show-incident")
    assert not browser.all(".mark.incident") and browser.all(".mark.restart")
    browser.type("#find", "TIME/")
    browser.until(lambda: browser.texts("figcaption") == ["time/rollout", "time/step", "time/update"])
    browser.type("#find", "reward/mean")
    browser.until(lambda: browser.texts("figcaption") == ["reward/mean"])
    browser.click(f"{figure} svg")
    browser.until(lambda: browser.texts("#step") in (["step 1"], ["step 2"]))  # the middle of steps 0 to 3


def test_a_click_leads_to_the_run_whose_curve_is_nearest(browser, tmp_path):
    runs = []
    for name, rewards in (("flat", (0.0, 0.0, 0.0)), ("rising", (0.1, 0.55, 1.0))):
        runs.append(make_run(tmp_path / name, steps=3))
        lines = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, figure = write_page(tmp_path / "view.html", *runs), "figure[data-metric='reward/mean']"
    # Shares of the width and the height of the panel. The last one is between two points of the rising curve.
    for left, top, step, run in (
        (0.55, 0.8, 2, 0),
        (0.55, 0.5, 2, 1),
        (0.97, 0.6, 3, 0),
        (0.97, 0.3, 3, 1),
        (0.75, 0.3, 2, 1),
    ):
        browser.open(page, "#find=reward/mean")
        browser.until(lambda: browser.texts("figcaption") == ["reward/mean"])
        browser.run(CLICK, browser.one(f"{figure} svg"), left, top)
        browser.until(lambda step=step: browser.texts("#step") == [f"step {step}"])
        assert browser.run("return [STATE.run, document.getElementById('run').value]") == [run, str(run)], (left, top)


def test_closed_sections_draw_their_curves_when_they_are_opened(browser, page):
    browser.open(page)
    assert not browser.all("figure[data-metric='time/update']")
    (section,) = [one for one in browser.all("details summary") if one.text.startswith("time ")]
    section.click()
    browser.until(lambda: browser.all("figure[data-metric='time/update']"))


def test_several_runs_are_beside_one_another(browser, tmp_path):
    runs = [make_run(tmp_path / name, steps=2 + i, kl_coef=i) for i, name in enumerate(("a<b>", "second"))]
    page = write_page(tmp_path / "view.html", *runs)
    browser.open(page)
    figure = "figure[data-metric='reward/mean']"
    assert len(browser.all(f"{figure} .curve")) == 2
    for i, run in enumerate(runs):  # a mark has the colour of its run; its dashes say of which kind it is
        marks = [look_of(browser, f"{figure} .{kind}.run{i} line") for kind in ("restart", "incident")]
        assert {mark["stroke"] for mark in marks} == {look_of(browser, f"{figure} .curve.run{i}")["stroke"]}
        assert len({mark["strokeDasharray"] for mark in marks}) == 2
        assert run.name in browser.texts(f"{figure} .restart.run{i} title")[0]
    assert look_of(browser, f"{figure} .curve.run0")["stroke"] != look_of(browser, f"{figure} .curve.run1")["stroke"]
    boxes = browser.all("#curves .bar label[class*=run] input")
    boxes[0].click()
    browser.until(lambda: len(browser.all(f"{figure} .curve")) == 1)
    browser.click("[data-tab='episodes']")
    browser.until(lambda: browser.texts("#step") == ["step 2"])
    browser.choose("#run", "1")
    browser.until(lambda: browser.texts("#step") == ["step 3"])
    browser.click("[data-tab='runs']")
    keys = browser.texts("#differing tbody tr")
    assert "algorithm.kl_coef01" in keys
    assert [one.split()[0] for one in browser.texts(".card[data-run] h2")] == ["a<b>", "second"]


def test_advice_and_what_was_left_out_are_above_the_curves(browser, tmp_path):
    with make_tracker(tmp_path / "run") as tracker:
        for step in range(1, 8):
            tracker.log(step, {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_std_frac": 1.0})
    path = tmp_path / "run/rollouts/step_1.arrow"
    path.parent.mkdir()
    path.write_bytes(b"damaged")
    browser.open(write_page(tmp_path / "view.html", tmp_path / "run"))
    advice, *notes = browser.texts("#advice li")
    assert advice.startswith("steps 1 to 7: ") and "rollout.n" in advice
    assert any(note.startswith("the episodes of step 1 cannot be read") for note in notes), notes
    browser.click("[data-tab='runs']")
    assert any("rollout.n" in row for row in browser.texts(".card tbody tr"))


def test_the_overview_has_the_terms_of_the_reward_and_the_best_value(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    lines = [{"step": 1, "reward/mean": 1.0, "reward/right/mean": 0.5, "val/accuracy": 0.5}]
    lines += [{"step": 2, "reward/mean": 2.0**60, "reward/right/mean": 0.7, "val/accuracy": 0.75}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser.open(write_page(tmp_path / "view.html", run))
    assert browser.texts("figcaption") == ["reward/mean", "reward/right/mean", "val/accuracy"]
    assert browser.texts("#best") == ["best val/accuracy 0.750 at step 2"]
