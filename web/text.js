// A text that grows at its end. Of a long one only the end stays on the page, so that a hundred
// thousand tokens take no more memory than a thousand.

const MOST_CHARACTERS = 24_000;
// Closer than this to its end, a reader is taken along with it.
const NEAR_END = 48;

export class Text {
  constructor(article) {
    this.article = article;
    this.waiting = "";
    this.clear("");
  }

  /** Begins anew with a prompt. */
  clear(prompt) {
    this.waiting = "";
    this.article.replaceChildren();
    this.paragraph = null;
    this.newlines = 0;
    this.characters = 0;
    if (prompt) {
      const span = document.createElement("span");
      span.className = "prompt";
      span.textContent = prompt;
      this.add(span, prompt.length);
    }
    this.article.scrollTop = 0;
  }

  /** Appends text, when the browser draws next. */
  append(text) {
    if (!text) return;
    if (!this.waiting) requestAnimationFrame(() => this.draw());
    this.waiting += text;
  }

  /** Puts everything that waits onto the page. */
  draw() {
    const { article } = this;
    const isAtEnd = article.scrollHeight - article.scrollTop - article.clientHeight < NEAR_END;
    const text = this.waiting;
    this.waiting = "";
    for (const part of text.split(/(\n)/)) {
      if (part === "\n") {
        this.paragraph = null;
        this.newlines += 1;
        // A blank line divides stories, whether it comes in one piece or in two.
        if (this.newlines !== 2) continue;
        const gap = document.createElement("p");
        gap.className = "gap";
        gap.textContent = "* * *";
        this.article.append(gap);
        this.characters += gap.textContent.length;
      } else if (part) {
        this.newlines = 0;
        this.add(document.createTextNode(part), part.length);
      }
    }
    while (this.characters > MOST_CHARACTERS && this.article.childElementCount > 1) {
      this.characters -= this.article.firstElementChild.textContent.length;
      this.article.firstElementChild.remove();
    }
    if (isAtEnd) article.scrollTop = article.scrollHeight;
  }

  add(node, length) {
    if (!this.paragraph) {
      this.paragraph = document.createElement("p");
      this.article.append(this.paragraph);
    }
    this.paragraph.append(node);
    this.paragraph.normalize();
    this.characters += length;
    // A text without paragraphs is cut as well.
    if (this.paragraph.textContent.length > MOST_CHARACTERS / 4) this.paragraph = null;
  }
}
