// Keeps an open page up to date: requests the same page again and replaces the parts that differ. The server renders
// all of the HTML; without this script a page is complete, and is updated by reloading it.
"use strict";

(() => {
  const SECONDS = 2;
  const SECONDS_HIDDEN = 30;
  let etag = "";

  // What the reader has done to a part, kept when the part is replaced.
  function carryOver(from, to) {
    for (const old of from.querySelectorAll("details[id], input[id], pre[id]")) {
      const now = to.querySelector("#" + CSS.escape(old.id));
      if (now === null) continue;
      if (old.tagName === "DETAILS") now.open = old.open;
      if (old.tagName === "INPUT" && now.value === old.value) now.checked = old.checked;
    }
    // Rows may have moved: choices belong to values.
    const chosen = new Set([...from.querySelectorAll("input:checked")].map((input) => input.value));
    for (const input of to.querySelectorAll("input[type=checkbox]")) input.checked = chosen.has(input.value);
  }

  function scrolled(part) {
    return [...part.querySelectorAll("pre[id]")].map((pre) => {
      const atEnd = pre.scrollHeight - pre.clientHeight - pre.scrollTop < 8;
      return [pre.id, atEnd ? null : pre.scrollTop];
    });
  }

  function toEnd(pre) {
    pre.scrollTop = pre.scrollHeight;
  }

  function isInUse(part) {
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode);
  }

  function replacePart(part, fresh) {
    const places = scrolled(part);
    const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
    carryOver(part, fresh);
    part.replaceWith(fresh);
    for (const [id, top] of places) {
      const pre = document.getElementById(id);
      if (pre === null) continue;
      if (top === null) toEnd(pre);
      else pre.scrollTop = top;
    }
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }

  const shown = new Map();

  function put(text) {
    const page = new DOMParser().parseFromString(text, "text/html");
    for (const fresh of page.querySelectorAll("[data-live]")) {
      const part = document.getElementById(fresh.id);
      const html = fresh.outerHTML;
      if (part === null || shown.get(fresh.id) === html || isInUse(part)) continue;
      shown.set(fresh.id, html);
      replacePart(part, document.importNode(fresh, true));
    }
    document.title = page.title;
  }

  async function renew() {
    try {
      const headers = etag ? { "If-None-Match": etag } : {};
      const answer = await fetch(location.href, { headers, cache: "no-store", redirect: "error" });
      document.getElementById("gone").hidden = answer.ok || answer.status === 304 || answer.status === 404;
      if (answer.ok) {
        etag = answer.headers.get("ETag") ?? "";
        put(await answer.text());
      }
    } catch {
      document.getElementById("gone").hidden = false;
    }
  }

  let wake = () => {};

  async function go() {
    for (;;) {
      await new Promise((done) => {
        wake = done;
        setTimeout(done, (document.hidden ? SECONDS_HIDDEN : SECONDS) * 1000);
      });
      await renew();
    }
  }

  document.addEventListener("visibilitychange", () => wake());
  for (const part of document.querySelectorAll("[data-live]")) shown.set(part.id, part.outerHTML);
  for (const pre of document.querySelectorAll("pre.log[id$=-lines]")) toEnd(pre);
  document.addEventListener("toggle", (event) => event.target.querySelectorAll("pre[id$=-lines]").forEach(toEnd), true);
  go();
})();
