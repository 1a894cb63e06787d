"""The console in a real browser, in front of real processes: what people see, do and hear."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.console_stack import ConsoleStack
from tests.fakes.running_stack import free_port

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe_api = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core")

pytestmark = [pytest.mark.e2e, pytest.mark.redis]

PATIENCE_MS = 20_000
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}

WATCH = "addEventListener('securitypolicyviolation', e => console.error('CSP ' + e.blockedURI));"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleStack]:
    made = ConsoleStack(tmp_path_factory.mktemp("console"), blocks=64, cpu_blocks=32, step_ms=20)
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed")
    with playwright_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


class Visitor:
    """A person with a browser window of their own."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESKTOP, **options})
        self.context.set_default_timeout(PATIENCE_MS)
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)

    def open(self, url: str, key: str = "") -> Any:
        """Go to the console, and give the key if there is one; the page, once it is live."""
        self.page.goto(url + "/console")
        if key:
            self.page.get_by_label("API key", exact=True).fill(key)
            self.page.get_by_role("button", name="Open the console").click()
        self.page.locator("#main").wait_for()
        return self.page

    def _hear(self, message: Any) -> None:
        is_refusal = message.text.startswith("Failed to load resource")  # as a test brought about
        if message.type in {"error", "warning"} and not is_refusal:
            self.complaints.append(message.text)


@pytest.fixture
def visitor(browser: Any) -> Iterator[Visitor]:
    visitors: list[Visitor] = [Visitor(browser)]
    yield visitors[0]
    for one in visitors:
        one.context.close()
        assert one.complaints == []


@pytest.fixture
def admin(stack: ConsoleStack, visitor: Visitor) -> Any:
    return visitor.open(stack.url, stack.keys["root"])


@pytest.fixture
def load(stack: ConsoleStack) -> Iterator[None]:
    """Requests of two tenants, too many for the blocks there are."""
    for number in range(8):
        stack.begin(("alice", "bob")[number % 2], 60 + 20 * number, 600, seed=number + 1)
    yield
    stack.hang_up()


def wait(page: Any, condition: str, arg: Any = None) -> None:
    """Ask again and again from outside: inside, the page's policy lets nobody evaluate text."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(condition, arg):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def test_the_page_asks_for_a_key_and_says_when_it_is_wrong(
    stack: ConsoleStack, visitor: Visitor
) -> None:
    page = visitor.page
    page.goto(stack.url + "/console")
    key = page.get_by_label("API key", exact=True)
    key.wait_for()
    assert page.locator("#door-problem").inner_text() == ""
    key.fill("wrong")
    key.press("Enter")
    wait(page, "document.getElementById('door-problem').textContent.includes('not known')")
    key.fill(stack.keys["alice"])
    key.press("Enter")
    page.locator("#main").wait_for()
    assert page.evaluate("location.href") == stack.url + "/console"
    assert page.evaluate("Object.keys(localStorage).length") == 0


@pytest.mark.usefixtures("load")
def test_what_runs_is_seen_in_the_table_and_in_the_map(stack: ConsoleStack, admin: Any) -> None:
    admin.locator("#live tr").nth(3).wait_for()
    listed = {one["id"][:8] for one in stack.get("/v1/requests", who="alice")["data"]}
    shown = set(admin.locator("#live button.id").all_inner_texts())
    assert listed & shown
    canvas = admin.locator("canvas.blocks").first
    before = canvas.evaluate("one => one.toDataURL()")
    wait(admin, "b => document.querySelector('canvas.blocks').toDataURL() !== b", before)
    assert "held" in admin.locator(".counts").first.inner_text()
    assert admin.locator("#charts article").count() == 5
    wait(admin, "/^\\d/.test(document.querySelector('.figure').textContent)")


@pytest.mark.usefixtures("load")
def test_a_preemption_is_a_part_of_a_life(admin: Any) -> None:
    bar = "canvas.bar[aria-label*='decode'][aria-label*='swapped'], "
    bar += "canvas.bar[aria-label*='decode'][aria-label*='preempted']"
    admin.locator(bar).first.wait_for()
    admin.locator(
        "#events li[data-kind='swapped'], #events li[data-kind='preempted']"
    ).first.wait_for()


@pytest.mark.usefixtures("load")
def test_a_request_is_picked_and_cancelled_with_the_keyboard(admin: Any) -> None:
    admin.locator("#live tr").first.wait_for()
    assert admin.evaluate("document.activeElement.id") == "main"
    admin.keyboard.press("Tab")
    assert admin.evaluate("document.getElementById('main').contains(document.activeElement)")
    admin.get_by_role("link", name="Skip to the requests").press("Enter")
    assert admin.evaluate("document.activeElement.id") == "requests"
    slider = admin.get_by_role("slider").first
    slider.focus()
    admin.keyboard.press("Home")
    admin.keyboard.press("ArrowRight")
    assert (slider.get_attribute("aria-valuetext") or "").startswith("block 1: ")
    button = admin.locator("#live button.id").first
    req_id = button.get_attribute("title")
    button.focus()
    admin.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    cancel = admin.get_by_role("button", name="Cancel request")
    cancel.focus()
    admin.keyboard.press("Enter")
    admin.locator(f"#ended tr[data-id='{req_id}']").wait_for()


@pytest.mark.usefixtures("load")
def test_a_worker_that_is_killed_is_told(stack: ConsoleStack, admin: Any) -> None:
    admin.locator("#live tr").first.wait_for()
    stack.kill("gpu-2")
    told = admin.locator("#events li[data-kind='worker_lost']").first
    told.wait_for()
    assert "gpu-2" in told.inner_text()
    wait(admin, "document.getElementById('announce').textContent.startsWith('Worker lost: gpu-2')")
    admin.locator("canvas.bar[aria-label*='worker lost']").first.wait_for()
    stack.start_worker("gpu-2")
    admin.locator("#events li[data-kind='worker_added']").first.wait_for()


def test_an_administrator_changes_limits_and_is_told_what_is_wrong_with_them(
    stack: ConsoleStack, admin: Any
) -> None:
    field = admin.get_by_label("Running requests, at most")
    wait(admin, "document.getElementById('limit-MAX_NUM_SEQS')?.value === '256'")
    field.fill("100000")
    admin.get_by_role("button", name="Apply").click()
    wait(admin, "document.querySelector('.outcome.is-bad')?.textContent.includes('MAX_NUM_SEQS')")
    field.fill("200")
    admin.get_by_role("button", name="Apply").click()
    wait(admin, "document.getElementById('limits-outcome').textContent.includes('=200')")
    assert stack.get("/admin/config")["settings"]["MAX_NUM_SEQS"] == "200"
    admin.locator("#events li[data-kind='settings_changed']").first.wait_for()


@pytest.mark.usefixtures("load")
def test_a_user_sees_its_own_requests_and_no_controls(
    stack: ConsoleStack, visitor: Visitor
) -> None:
    page = visitor.open(stack.url, stack.keys["alice"])
    page.locator("#live tr").first.wait_for()
    page.wait_for_timeout(1200)
    own = {one["id"] for one in stack.get("/v1/requests", who="alice")["data"]}
    others = {one["id"] for one in stack.get("/v1/requests", who="bob")["data"]}
    shown = page.locator("#live tr").evaluate_all("rows => rows.map(r => r.dataset.id)")
    assert own & set(shown)
    assert not others & set(shown)
    assert others
    assert not page.locator("#controls").is_visible()
    assert not page.locator("th.admin-only").is_visible()
    assert "bob" not in page.content()


def test_the_chat_streams_and_can_be_stopped(admin: Any) -> None:
    admin.get_by_label("At most", exact=True).fill("900")
    said = admin.get_by_label("Your message")
    said.fill("<img src=x onerror=alert(1)> hello")
    said.press("Enter")
    wait(admin, "document.querySelector('.message.assistant .text')?.textContent.length > 5")
    assert admin.locator(".message.user .text").inner_text() == "<img src=x onerror=alert(1)> hello"
    assert admin.locator("#talk img").count() == 0
    admin.get_by_role("button", name="Stop").click()
    admin.locator(".stopped").wait_for()
    assert "tokens" in admin.locator("#chat-figures").inner_text()
    assert admin.get_by_role("button", name="Send").is_enabled()


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_theme_is_accessible(
    stack: ConsoleStack, browser: Any, theme: str, tmp_path: Path
) -> None:
    """As axe-core finds it: nothing serious, nothing critical."""
    visitor = Visitor(browser, color_scheme=theme, reduced_motion="reduce")
    page = visitor.page
    page.goto(stack.url + "/console")
    page.get_by_label("API key", exact=True).wait_for()
    assert grave(page) == []
    visitor.open(stack.url, stack.keys["root"])
    page.locator("#live button.id").first.click()
    page.locator("#events li").first.wait_for()
    page.get_by_label("Your message").fill("hello")
    assert grave(page) == []
    page.screenshot(path=tmp_path / f"{theme}.png", full_page=True)
    lightness = "Number(getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/)[0])"
    assert (page.evaluate(lightness) > 128) == (theme == "light")
    button = page.locator("#theme")
    while button.get_attribute("aria-label") != f"Theme: {'dark' if theme == 'light' else 'light'}":
        button.click()
    assert (page.evaluate(lightness) > 128) == (theme == "dark")
    assert grave(page) == []
    visitor.context.close()
    assert visitor.complaints == []


def grave(page: Any) -> list[Any]:
    found = axe_api.Axe().run(page).response["violations"]
    return [
        (one["id"], [node["target"] for node in one["nodes"]])
        for one in found
        if one["impact"] in {"serious", "critical"}
    ]


@pytest.mark.usefixtures("load")
def test_on_a_phone_nothing_is_wider_than_the_screen(
    stack: ConsoleStack, visitor: Visitor, tmp_path: Path
) -> None:
    page = visitor.page
    page.set_viewport_size(DESKTOP)
    visitor.open(stack.url, stack.keys["root"])
    page.locator("#live button.id").first.click()
    for width in (PHONE["width"], 360):
        page.set_viewport_size({"width": width, "height": 844})
        wait(page, "w => document.documentElement.scrollWidth === w", width)
        page.screenshot(path=tmp_path / f"{width}.png", full_page=True)


def test_a_drain_and_the_loss_of_the_gateway_are_shown_and_it_comes_back_by_itself(
    stack: ConsoleStack, visitor: Visitor
) -> None:
    """Where there are no keys, nobody is asked for one."""
    port = free_port()
    stack.start_gateway(port, has_keys=False)
    page = visitor.open(f"http://127.0.0.1:{port}")
    page.get_by_role("button", name="Drain this gateway").click()
    page.get_by_role("button", name="Keep it").click()
    assert page.locator("#link-text").inner_text() == "Live"
    page.get_by_role("button", name="Drain this gateway").click()
    page.get_by_role("button", name="Drain it").click()
    wait(page, "document.getElementById('link-text').textContent.includes('drains')")
    stack.kill(f"gateway-{port}")
    wait(page, "document.getElementById('banner').textContent.includes('Connection lost')")
    stack.start_gateway(port, has_keys=False)
    wait(page, "document.getElementById('link-text').textContent === 'Live'")
    assert not page.locator("#banner").is_visible()
