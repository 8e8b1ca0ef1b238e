// On a narrow screen the rows of a table become cards, see site.css: each cell says which column it is of.
for (const table of document.querySelectorAll("article table")) {
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
  if (heads.length < 2) continue;
  table.classList.add("stacks");
  if (heads.length === 2) continue;
  for (const row of table.querySelectorAll("tbody tr"))
    [...row.children].forEach((cell, place) => cell.setAttribute("data-column", heads[place]));
}
