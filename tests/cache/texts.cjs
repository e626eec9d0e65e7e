// Prompts: the same ones on every machine, from the bundled document.
'use strict';
const fs = require('fs');
const path = require('path');

const root = path.join(__dirname, '..', '..');

// mulberry32.
function randomSource(seed) {
  let state = seed >>> 0;
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  return {
    below: (n) => Math.floor(next() * n),
    pick: (list) => list[Math.floor(next() * list.length)]
  };
}

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

// Facts the demo model was taught to find: {fact, question, answer}.
function facts(random, count) {
  const lists = JSON.parse(fs.readFileSync(path.join(root, 'models/demo/needles.json'), 'utf8'));
  const used = new Set();
  const out = [];
  while (out.length < count) {
    const entity = lists.entity.replace('{adjective}', random.pick(lists.adjectives))
                       .replace('{noun}', random.pick(lists.nouns));
    if (used.has(entity)) continue;
    used.add(entity);
    const template = lists.templates[out.length % 3];  // English ones; the text is English
    const value =
        template.value.replace(/integer 1000\.\.999999/, () => String(1000 + random.below(999000)))
            .replace(/\{word\}/g, () => random.pick(lists.words))
            .replace(/\{keeper\}/g, () => random.pick(lists.keepers));
    const fill = (text) => text.replace('{entity}', entity).replace('{value}', value);
    out.push({
      fact: fill(template.fact),
      question: fill(template.question),
      answer: fill(template.answer)
    });
  }
  return out;
}

// Paragraphs of the document in random order, about `characters` of them, facts spread evenly.
function plantedDocument(random, characters, planted) {
  const text = fs.readFileSync(path.join(root, 'models/documents/debian-faq.txt'), 'utf8');
  const all = text.split(/\n\s*\n/)
                  .map((p) => p.trim())
                  .filter(
                      (p) => p.length > 80 &&
                          !/The access code for|The passphrase of|The keeper of/.test(p));
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
