"""The page in a real browser: episodes, runs, and what a reload keeps."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.support.viewed_pages import column, show_episodes, shown, write_page
from tests.support.viewed_runs import make_debate, make_episode, make_run
from trainer.data.rollout_io import write_rollouts


def test_the_slider_moves_over_the_steps(browser, page):
    show_episodes(browser, page)
    browser.until(lambda: browser.texts("#step") == ["step 3"])
    assert "16 episodes in 4 groups" in browser.texts("#summary")[0]
    assert "1 of 4 groups agree in their rewards" in browser.texts("#summary")[0]
    browser.click("#back")
    browser.until(lambda: browser.texts("#step") == ["step 2"] and column(browser, "uid")[0] == "0:8:0")
    browser.run("const s = document.getElementById('slider'); s.value = 0; s.dispatchEvent(new Event('input'))")
    browser.until(lambda: browser.texts("#step") == ["step 1"] and column(browser, "uid")[0] == "0:4:0")
    browser.click("#all")
    shown(browser, 48)
    browser.choose("#split", "validation")
    browser.until(lambda: column(browser, "uid") == ["val:0:0", "val:1:0", "val:2:0"])


def test_columns_sort_both_ways_and_back(browser, page):
    show_episodes(browser, page)
    first = column(browser, "uid")
    header = ".head [data-key='reward']"
    browser.click(header)
    rewards = [float(one) for one in column(browser, "reward")]
    assert rewards == sorted(rewards, reverse=True) and rewards[0] == 1
    browser.click(header)
    rewards = [float(one) for one in column(browser, "reward")]
    assert rewards == sorted(rewards) and rewards[0] == 0
    browser.click(header)
    assert column(browser, "uid") == first
    browser.click(".head [data-key='status']")
    assert column(browser, "status") == ["length"] * 4 + ["stop"] * 12
    browser.click(".head [data-key='term right']")
    assert column(browser, "term right")[0] == "1"
    for key in ("turns", "length", "advantage"):
        browser.click(f".head [data-key='{key}']")
        numbers = [float(one.replace("−", "-").replace(",", "")) for one in column(browser, key)]
        assert numbers == sorted(numbers, reverse=True), key


def test_the_header_of_the_sorted_column_shows_the_direction(browser, page):
    show_episodes(browser, page)
    inside = (
        "const arrow = arguments[0].querySelector('.arrow').getBoundingClientRect();"
        "const head = arguments[0].getBoundingClientRect();"
        "return arrow.width > 4 && arrow.left >= head.left && arrow.right <= head.right"
    )
    narrow = (
        "const table = document.getElementById('table'), count = table.querySelectorAll('.head .cell').length;"
        "table.style.setProperty('--columns', `repeat(${count}, 2.4rem)`)"
    )
    for key in browser.run("return [...document.querySelectorAll('.head .cell')].map((one) => one.dataset.key)"):
        header = f".head [data-key='{key}']"
        seen = []
        for _ in range(3):
            browser.run("arguments[0].click()", browser.one(header))
            sorted_by = browser.one(header).get_attribute("aria-sort")
            assert len(browser.all(".head .arrow")) == len(browser.all("[aria-sort]")) == (sorted_by is not None)
            if sorted_by is not None:
                assert browser.run(inside, browser.one(header)), key
                browser.run(narrow)
                assert browser.run(inside, browser.one(header)), key
                seen.append((sorted_by, browser.texts(f"{header} .arrow")[0]))
        assert sorted(seen) == [("ascending", "▲"), ("descending", "▼")], key
    browser.click(".head [data-key='reward']")
    name = browser.one(".head [data-key='reward'] .name")
    assert browser.run("return arguments[0].scrollWidth <= arguments[0].clientWidth", name), "the name is whole, too"


def test_filters_and_search_leave_what_they_say(browser, page):
    show_episodes(browser, page)
    browser.choose("#status", "length")
    shown(browser, 4)
    browser.choose("#status", "")
    browser.type("#low", "0.2")
    browser.type("#high", "0.6")
    shown(browser, 6)
    assert {*column(browser, "reward")} == {"0.500", "0.333", "0.250"}
    for field in ("#low", "#high"):
        browser.type(field, " ")
    shown(browser, 16)
    browser.click("#agree")
    shown(browser, 4)
    assert {*column(browser, "reward")} == {"1"}
    browser.click("#agree")
    shown(browser, 16)
    browser.type("#search", "QUESTION 2")  # of the prompts, which the table does not show
    browser.until(lambda: column(browser, "uid") == [f"0:14:{number}" for number in range(4)])
    browser.type("#search", "answer 3")
    browser.until(lambda: column(browser, "uid") == [f"0:15:{number}" for number in range(4)])
    browser.type("#search", "<!-- ")
    shown(browser, 1)
    browser.type("#search", "nowhere")
    shown(browser, 0)


def test_a_search_that_ends_late_does_not_undo_a_newer_one(browser, page):
    show_episodes(browser, page)
    browser.run(
        "window.held = []; const real = bytesOf;"
        "bytesOf = (id) => new Promise((go) => window.held.push(go)).then(() => real(id))"
    )
    browser.type("#search", "answer 3")
    browser.until(lambda: browser.run("return window.held.length"))
    browser.type("#search", " ")
    browser.choose("#status", "length")
    shown(browser, 4)
    browser.run(
        "window.held.forEach((go) => go());"
        "return Promise.all(unpacked.values()).then(() => new Promise((go) => setTimeout(go, 200)))"
    )
    assert browser.texts("#count") == ["4 shown"]


def test_groups_are_listed_and_opened(browser, page):
    show_episodes(browser, page)
    browser.choose("#view", "groups")
    shown(browser, 4)
    assert column(browser, "agrees") == ["agree", "", "", ""]
    assert column(browser, "mean") == ["1", "0.250", "0.167", "0.125"]
    browser.click(".head [data-key='mean']")
    browser.click(".head [data-key='mean']")
    browser.until(lambda: column(browser, "mean")[0] == "0.125")
    browser.all(".row")[0].click()
    browser.until(lambda: column(browser, "group") == ["4"] * 4)
    browser.until(lambda: "0:15:0" in "".join(browser.texts("#detail h2")))
    browser.click("#ungroup")
    shown(browser, 16)


def test_an_episode_is_a_conversation_with_coloured_tokens(browser, page):
    show_episodes(browser, page)
    browser.click(".row[data-uid='0:13:1']")
    browser.until(lambda: browser.all("#conversation .policy"))
    assert browser.texts("#conversation .role") == ["user", "assistant (policy)"]
    said = "reply 1 of step 3 naïve 👋<|end|>"
    assert browser.texts("#conversation .content") == ["question 1", said]
    spans = "#conversation .policy .t"
    assert len(browser.all(spans)) == len(said.removesuffix("<|end|>").encode()) + 1, "a token is a byte here"
    assert browser.all("#conversation .t[class*=hot]")
    for colour, shades in (("entropy", "[class*=cool]"), ("difference", "[class*=plus]")):
        browser.choose("#colour", colour)
        browser.until(lambda shades=shades: browser.all(f"{spans}{shades}"))
    browser.choose("#colour", "none")
    browser.until(lambda: not browser.all(f"{spans}[class*=plus]"))
    browser.choose("#colour", "mask")
    browser.until(lambda: browser.all("#conversation .t.context"))
    assert browser.texts("#conversation .content") == [f"<|user|>question 1<|assistant|>{said}"]
    assert len(browser.all("#conversation .t.sampled")) == len(said.removesuffix("<|end|>").encode()) + 1
    hover = "arguments[0].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    browser.run(hover, browser.all("#conversation .t.sampled")[1])
    tip = browser.texts("#tip")[0]
    assert all(word in tip for word in ('"e"', "the policy", "log-prob", "trainer", "entropy", "advantage"))
    browser.all(".siblings button")[3].click()
    browser.until(lambda: "0:13:3" in browser.texts("#detail h2")[0])


def test_long_episodes_and_those_of_several_turns_or_samples_are_shown(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    long = make_episode("0:0:0", [("first", "one"), ("second", "x" * 7000)], 1.0)
    whole, _ = make_episode("0:0:1", [("first", "one"), ("second", "two")], 0.0)
    parts = [make_episode("0:0:1", [turn], 0.0)[0].samples[0] for turn in (("first", "one"), ("second", "two"))]
    unknown, _ = make_episode("0:0:2", [("first", "one")], 0.5, group="0:0")
    several = [long[0], replace(whole, samples=parts), replace(unknown, turns=3)]
    write_rollouts(str(run), 1, several)
    show_episodes(browser, write_page(tmp_path / "view.html", run), "&uid=0:0:0")
    replies = "#conversation .policy .content"
    browser.until(lambda: len(browser.all(replies)) == 2)
    assert browser.texts(replies)[0] == "one<|end|>" and len(browser.all(f"{replies} .t")) == 3000 + 4
    for left in (4001, 1001):
        assert f"of {left:,} tokens" in browser.texts(f"{replies} button")[0]
        browser.click(f"{replies} button")
    browser.until(lambda: browser.texts(replies)[1] == "x" * 7000 + "<|end|>")
    browser.click(".row[data-uid='0:0:1']")
    browser.until(lambda: browser.texts(replies) == ["one<|end|>", "two<|end|>"])
    browser.click("#stream")
    browser.until(lambda: len(browser.all("#conversation .stream")) == 2)
    assert browser.texts("#conversation .role") == ["sample 1 of 2", "sample 2 of 2"]
    browser.click("#stream")
    browser.click(".row[data-uid='0:0:2']")  # its turns do not agree with its tokens
    browser.until(lambda: browser.texts("#conversation .role") == ["all tokens"])


def test_players_are_shown_with_their_rewards_and_advantages(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    write_rollouts(str(run), 1, [make_debate("0:0:0")[0]], scores=make_debate("0:0:0")[1])
    show_episodes(browser, write_page(tmp_path / "view.html", run), "&uid=0:0:0")
    browser.until(lambda: len(browser.all("#conversation .stream")) == 2)
    pro, con = "pro 1 (advantage 0.500)", "con -1 (advantage -1.500)"
    assert browser.texts("#conversation .role") == [f"{pro} · sample 1 of 2", f"{con} · sample 2 of 2"]
    assert "I am pro" in browser.texts("#conversation .content")[0]
    assert f"{pro}, {con}" in browser.texts("#detail dl")[0] and f"{pro}, {con}" in browser.texts(".row")[0]


def test_the_keyboard_moves_through_the_table(browser, page):
    from selenium.webdriver.common.keys import Keys

    show_episodes(browser, page)
    browser.one("#table").send_keys(Keys.ARROW_DOWN)
    browser.until(lambda: "0:12:0" in "".join(browser.texts("#detail h2")))
    browser.one("#table").send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP)
    browser.until(lambda: "0:12:1" in browser.texts("#detail h2")[0])


def test_hostile_text_is_shown_and_harms_nothing(browser, page):
    show_episodes(browser, page, "&uid=0:12:0")
    browser.until(lambda: browser.all("#conversation .policy"))
    for stream in (False, True):
        if stream:
            browser.click("#stream")
            browser.until(lambda: browser.all("#conversation .stream"))
        assert browser.run("return window.broken") is None
        assert not browser.all("#app script, #app img") and len(browser.all("script")) > 3
        text = "".join(browser.texts("#conversation .content"))
        for part in ("</script><script>window.broken = 1</script>", "<img src=x", "<!--", "{{DATA}}", "\\x1b", "\\x00"):
            assert part in text
        for part in ("\\u202e", "\\u202c", "\\u2028", "\\u200b", "👋"):
            assert part in text
        assert not {*"\x1b\x00\u202e\u2028\u200b"} & {*text}
    browser.click("#stream")
    browser.until(lambda: browser.all("#conversation .policy"))
    assert "\\ud83d" in browser.texts("#detail dl")[0] and len(browser.all("#conversation .given .hidden")) >= 7
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert "{{" not in browser.driver.title


def test_characters_that_cannot_be_seen_are_named(browser, page):
    browser.open(page)
    script = "const node = document.createElement('p'); put(node, arguments[0]); return node.innerHTML"
    for hidden in "\u034f\u115f\u3164\ufe0f\U000e0101\U000e0041":
        name = hidden.encode("unicode_escape").decode()
        for before in ("", "a", "\u6f22", "\u2764\ufe0f"):
            assert browser.run(script, f"{before}{hidden}b") == f'{before}<span class="hidden">{name}</span>b'
    for seen in ("\u2764\ufe0f", "1\ufe0f\u20e3", "\U0001f441\ufe0f\u200d\U0001f5e8\ufe0f", "e\u0301 \u0939\u093f"):
        assert browser.run(script, seen) == seen


COUNT_WORK = """
    window.work = { rows: 0, unpacked: 0 };
    const make = el, read = bytesOf;
    el = (tag, attributes, ...children) => {
      if (attributes && attributes.role === "row") work.rows++;
      return make(tag, attributes, ...children);
    };
    bytesOf = (id) => { work.unpacked++; return read(id); };
"""


def test_ten_thousand_episodes_are_a_few_rows_of_the_page(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    made = [make_episode(f"0:{i // 8}:{i % 8}", [("q", f"r{i}")], float(i), seed=i) for i in range(10_000)]
    write_rollouts(str(run), 1, [episode for episode, _ in made], scores=[scores for _, scores in made])
    show_episodes(browser, write_page(tmp_path / "view.html", run))
    shown(browser, 10_000)
    assert len(browser.all(".row")) < 100
    browser.run(COUNT_WORK)
    browser.click(".head [data-key='reward']")
    browser.until(lambda: column(browser, "preview")[0] == "r9999")
    assert 0 < browser.run("return work.rows") < 100, "a sort draws the rows that can be seen"
    browser.run("const table = document.getElementById('table'); table.scrollTop = table.scrollHeight")
    browser.until(lambda: column(browser, "preview")[-1] == "r0")
    assert len(browser.all(".row")) < 100
    browser.run("work.rows = 0")
    for words, count in (("r99", 111), ("r999", 11), ("r", 10_000)):
        browser.type("#search", words)
        shown(browser, count)
    assert browser.run("return work.rows") < 600 and browser.run("return work.unpacked") == 1


def test_a_reload_keeps_what_is_shown(browser, page):
    show_episodes(browser, page)
    browser.click("#back")
    browser.type("#search", "reply 2")
    shown(browser, 4)
    browser.click(".row[data-uid='0:9:2']")
    browser.until(lambda: browser.all("#conversation .policy"))
    browser.driver.refresh()
    browser.until(lambda: browser.texts("#count") == ["4 shown"] and browser.all("#conversation .policy"))
    assert browser.texts("#step") == ["step 2"] and "0:9:2" in browser.texts("#detail h2")[0]


def test_a_page_that_is_loaded_again_shows_what_is_new(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    out = write_page(tmp_path / "view.html", run)
    show_episodes(browser, out, "&step=1")
    make_run(tmp_path / "other", steps=4)
    write_page(out, tmp_path / "other")
    browser.driver.refresh()
    browser.until(lambda: browser.run("return document.getElementById('slider')?.max") == "3")
    browser.until(lambda: browser.texts("#step") == ["step 1"])


def test_a_page_that_is_loaded_again_keeps_the_place_of_the_reader(browser, tmp_path):
    run, name = make_run(tmp_path / "run", steps=1), "0:15:5"
    made = [make_episode(f"0:{i // 8}:{i % 8}", [("q", f"r{i}" * 2000)], i / 200, seed=i) for i in range(200)]
    write_rollouts(str(run), 1, [episode for episode, _ in made])
    out = write_page(tmp_path / "view.html", run)
    show_episodes(browser, out)
    browser.run("change({ uid: arguments[0] }, showTab)", name)  # its row is further down
    browser.click("#detail button.more")
    browser.until(lambda: len(browser.all("#conversation .t")) == 6000)
    browser.type("#search", "r1")
    shown(browser, 111)
    browser.run("table.scrollTop = 260; detail.scrollTop = 700; search.setSelectionRange(1, 1)")
    write_rollouts(str(run), 2, [episode for episode, _ in made[:8]])
    write_page(out, run)
    browser.driver.refresh()
    browser.until(lambda: browser.run("return document.getElementById('slider')?.max") == "1")
    browser.until(lambda: len(browser.all("#conversation .t")) == 6000)
    assert name in browser.texts("#detail h2")[0]
    browser.until(lambda: browser.run("return [table.scrollTop, detail.scrollTop]") == [260, 700])
    assert browser.run("return [document.activeElement.id, search.selectionStart]") == ["search", 1]
    browser.run("document.querySelector('.row').click()")  # another episode begins at its beginning
    browser.until(lambda: name not in browser.texts("#detail h2")[0])
    assert len(browser.all("#conversation .t")) == 3000


def test_a_page_that_is_loaded_again_keeps_open_what_was_open(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    out = write_page(tmp_path / "view.html", run)
    browser.open(out, "#tab=runs")
    browser.click(".card summary")
    browser.type("#config-0", "kl_co")
    browser.driver.refresh()
    browser.until(lambda: browser.texts(".config tr") == ["algorithm.kl_coef0.1"])
    assert browser.run("return [document.querySelector('.card details').open, document.activeElement.id]") == [
        True,
        "config-0",
    ]
    browser.click("[data-tab='curves']")
    (section,) = [one for one in browser.all("details summary") if one.text.startswith("time ")]
    section.click()
    browser.until(lambda: browser.all("figure[data-metric='time/update']"))
    browser.run("main.scrollTop = 100")
    browser.driver.refresh()
    browser.until(lambda: browser.all("figure[data-metric='time/update']"))
    assert browser.run("return main.scrollTop") == 100


def test_a_run_without_episodes_says_how_to_keep_them(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    for folder in ("rollouts", "validation"):
        for file in (run / folder).iterdir():
            file.unlink()
    browser.open(write_page(tmp_path / "view.html", run), "#tab=episodes")
    assert "logger.save_rollouts=true" in browser.texts("#episodes .empty")[0]


def test_what_was_not_recorded_is_said(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1, with_scores=False)
    show_episodes(browser, write_page(tmp_path / "view.html", run), "&uid=0:4:0")
    browser.until(lambda: browser.all("#colour"))
    options = {one.get_attribute("value"): one for one in browser.all("#colour option")}
    assert options["logprob"].is_enabled() and options["logprob"].text == "log-prob"
    assert not options["entropy"].is_enabled() and options["entropy"].text == "entropy (not recorded)"


def test_names_that_every_object_of_the_browser_has_are_names_like_others(browser, tmp_path):
    names = ("constructor", "toString", "__proto__")
    run = make_run(tmp_path / "run", steps=1)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 2, "reward/mean": 0.5, **dict.fromkeys(names, 0.25)}) + "\n")
    others = make_run(tmp_path / "others", steps=1)
    values = dict.fromkeys(names, 0.5)
    named, _ = make_episode("0:0:0", [("q", "r")], 1.0, rewards=values, metrics={"hasOwnProperty": 2.0, **values})
    plain, _ = make_episode("0:0:1", [("q", "r")], 0.0, rewards={"right": 0.0}, metrics={"calls": 1.0})
    write_rollouts(str(run), 1, [named, plain])
    page = write_page(tmp_path / "view.html", run, others)
    show_episodes(browser, page, "&colour=constructor&uid=0:0:0")
    browser.until(lambda: browser.all("#conversation .policy"))
    for name in names:
        assert column(browser, f"term {name}") == column(browser, f"metric {name}") == ["0.500", "–"]
    assert "constructor 0.500, toString 0.500, __proto__ 0.500" in browser.texts("#detail dd")[0]
    browser.open(page, "#tab=constructor&valueOf=1&find=o")
    for name in names:
        browser.until(lambda name=name: browser.all(f"figure[data-metric='{name}'] .curve"))
        assert len(browser.all(f"figure[data-metric='{name}'] .curve")) == 1
    browser.click("[data-tab='runs']")
    assert "valueOf" not in browser.run("return location.hash")
    assert len(browser.all(".card[data-run]")) == 2


def test_a_phone_shows_the_episode_that_is_tapped_and_the_whole_name_of_the_run(browser, tmp_path):
    """Replies of different lengths do not move the columns behind them."""
    run = make_run(tmp_path / "demo-with-arithmetic-grpo", steps=1)
    replies = ("brief", "of many words, " * 10)
    made = [
        make_episode(f"0:4:{n}", [("q", reply)], 1.0, rewards={"a": 1.0, "b": 0.0}) for n, reply in enumerate(replies)
    ]
    write_rollouts(str(run), 1, [episode for episode, _ in made], scores=[own for _, own in made])
    page = write_page(tmp_path / "view.html", run)
    place = "const { left, top, right } = arguments[0].getBoundingClientRect(); return { left, top, right }"
    for width, height in ((390, 844), (1440, 900)):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        show_episodes(browser, page)
        assert browser.run("return arguments[0].scrollWidth <= arguments[0].clientWidth", browser.one("h1"))
        lasts = [
            browser.run(place, one)["left"] for one in browser.all(".head .cell:last-child, .row .cell:last-child")
        ]
        assert len(lasts) == 3 and len({*lasts}) == 1, "the column of the names"
        shown_reply = browser.run(place, browser.all(".row .cell")[4])
        assert column(browser, "preview")[0] == "brief" and shown_reply["left"] + 50 < width
        if width > 900:
            assert shown_reply["right"] - shown_reply["left"] > 230
        browser.all(".row")[1].click()
        browser.until(lambda: browser.all("#conversation .policy"))
        browser.until(lambda height=height: browser.run(place, browser.one("#conversation"))["top"] < height - 100)
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
