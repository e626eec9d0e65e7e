// Prompts: the same ones on every machine, from the bundled document.
'use strict';
const fs = require('fs');
const path = require('path');

const {root, factPattern, randomSource, facts} = require('../needles/documents.cjs');

// Pieces of the document, in random order, as token ids or as text.
class Texts {
  static async make(server) {
    const texts = new Texts();
    texts.server = server;
    const document = fs.readFileSync(path.join(root, 'models/documents/debian-faq.txt'), 'utf8');
    texts.all = (await server.post('/tokenize', {prompt: document})).tokens;
    return texts;
  }

  // Exactly n token ids; other seeds, other ids from the first block on.
  ids(seed, n) {
    const random = randomSource(seed);
    const out = [];
    while (out.length < n) {
      const length = 100 + random.below(300);
      const from = random.below(this.all.length - length);
      out.push(...this.all.slice(from, from + Math.min(length, n - out.length)));
    }
    return out;
  }

  // About n tokens of text.
  async string(seed, n) {
    return (await this.server.post('/detokenize', {tokens: this.ids(seed, n)})).prompt;
  }
}

// Paragraphs of the document in random order, about `characters` of them, facts spread evenly.
function plantedDocument(random, characters, planted) {
  const text = fs.readFileSync(path.join(root, 'models/documents/debian-faq.txt'), 'utf8');
  const all = text.split(/\n\s*\n/)
                  .map((p) => p.trim())
                  .filter((p) => p.length > 80 && !factPattern.test(p));
  const body = [];
  for (let length = 0; length < characters; length += body[body.length - 1].length + 2) {
    body.push(random.pick(all));
  }
  planted.forEach((fact, i) => {
    body.splice(Math.floor(((i + 0.5) / planted.length) * (body.length - i)) + i, 0, fact.fact);
  });
  return body.join('\n\n');
}

module.exports = {Texts, facts, plantedDocument, randomSource};
