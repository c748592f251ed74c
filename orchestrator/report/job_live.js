// Fetch the page again when the job has changed; opened details stay open.
const title = (details) => `${details.closest("article")?.getAttribute("aria-labelledby")} ${details.firstElementChild.textContent}`;
new EventSource(`${location.pathname}/events`).onmessage = async () => {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const open = new Set([...document.querySelectorAll("details[open]")].map(title));
  const left = document.querySelector(".scroll")?.scrollLeft ?? 0;
  for (const part of ["header", "main"]) document.querySelector(part).replaceChildren(...fresh.querySelector(part).childNodes);
  for (const one of document.querySelectorAll("details")) if (open.has(title(one))) one.open = true;
  tools();
  move(left);
};
