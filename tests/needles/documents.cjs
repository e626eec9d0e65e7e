// Documents with facts planted in them, the same on every machine for a seed.
'use strict';
const fs = require('fs');
const path = require('path');

const root = path.join(__dirname, '..', '..');
const lists = JSON.parse(fs.readFileSync(path.join(root, 'models/demo/needles.json'), 'utf8'));
const factPattern = /The access code for|The passphrase of|The keeper of|的访问密码是/;

// mulberry32
function randomSource(seed) {
  let state = seed >>> 0;
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  return {below: (n) => Math.floor(next() * n), pick: (list) => list[Math.floor(next() * list.length)]};
}

// `count` facts {fact, question, answer} about different entities, the English templates in turn. Distinct
// ones share no word of their names: the demo model takes the amber mill for the cedar mill more often the longer the text is.
function facts(random, count, distinct) {
  const used = new Set();
  const out = [];
  while (out.length < count) {
    const names = [random.pick(lists.adjectives), random.pick(lists.nouns)];
    const entity = lists.entity.replace('{adjective}', names[0]).replace('{noun}', names[1]);
    if (distinct ? names.some((name) => used.has(name)) : used.has(entity)) continue;
    used.add(entity);
    names.forEach((name) => used.add(name));
    const template = lists.templates[out.length % 3];
    const value = template.value
      .replace(/integer 1000\.\.999999/, () => String(1000 + random.below(999000)))
      .replace(/\{word\}/g, () => random.pick(lists.words))
      .replace(/\{keeper\}/g, () => random.pick(lists.keepers));
    const fill = (text) => text.replace('{entity}', entity).replace('{value}', value);
    out.push({fact: fill(template.fact), question: fill(template.question), answer: fill(template.answer)});
  }
  return out;
}

// The text files of a folder, one after the other in the order of their paths, as the demo model was
// trained on them: no space at the ends of a line, one between words, one blank line at a time.
function corpus(folder) {
  return fs.readdirSync(folder, {recursive: true})
    .filter((name) => name.endsWith('.txt')).sort()
    .map((name) => fs.readFileSync(path.join(folder, name), 'utf8').split('\n')
      .map((line) => line.replace(/\s+/g, ' ').trim()).filter((line) => !factPattern.test(line))
      .join('\n').replace(/\n{3,}/g, '\n\n').trim())
    .join('\n\n');
}

// The text with fact i as a line of its own at depth (i + 0.5) / facts.
function plant(text, planted) {
  let out = '';
  let from = 0;
  planted.forEach((fact, i) => {
    const depth = Math.floor(((i + 0.5) / planted.length) * text.length);
    const at = Math.max(text.indexOf('\n', depth) + 1, from);
    out += text.slice(from, at) + fact.fact + '\n';
    from = at;
  });
  return out + text.slice(from);
}

module.exports = {root, factPattern, randomSource, facts, corpus, plant};
