// A field above the tables of configuration keys, which keeps the rows that contain all of its words.
const article = document.querySelector("article");
if (article?.querySelector("h1")?.id === "every-configuration-key") {
  const field = document.createElement("input");
  field.type = "search";
  field.className = "keys-filter";
  field.placeholder = "Filter, for example: checkpoint keep";
  field.setAttribute("aria-label", "Filter the keys");
  article.querySelector("h2").before(field);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().trim().split(/\s+/);
    const wanted = (row) => words.every((word) => row.textContent.toLowerCase().includes(word));
    let heading;
    for (let part = field.nextElementSibling; part; part = part.nextElementSibling) {
      const rows = [...part.querySelectorAll("tbody tr")];
      for (const row of rows) row.hidden = !wanted(row);
      const isHeading = /^H\d$/.test(part.tagName);
      const stays = !field.value.trim() || rows.some((row) => !row.hidden);
      part.hidden = !stays;
      if (isHeading) heading = part;
      else if (stays && heading) heading.hidden = false;
    }
  });
}
