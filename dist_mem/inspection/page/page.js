"use strict";
// Start of the page: the theme, and the book.

const root = document.documentElement, theme = byId("theme");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function showTheme() {
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-pressed", String(isDark()));
}

theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
showTheme();

if (typeof DecompressionStream === "undefined") {
  byId("book-sum").textContent = "This browser is too old to show the book: use one from 2023 or later.";
} else {
  Book.read(JSON.parse(byId("book-data").textContent)).then((book) => {
    const view = new BookView(book);
    addEventListener("hashchange", () => view.follow(location.hash));
    view.follow(location.hash);
  });
}
