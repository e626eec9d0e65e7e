// What is found again, and that it changes no text.
'use strict';
const {facts, plantedDocument, randomSource} = require('./texts.cjs');

const kBlock = 256;
const down = (tokens) => Math.floor(tokens / kBlock) * kBlock;

// A conversation that goes on turn by turn. `keep`: reasoning is sent back, as some clients do.
class Talk {
  constructor(extra, keep) {
    this.messages = [];
    this.extra = extra;
    this.keep = keep;
  }
  request(said, max_tokens) {
    this.messages.push({role: 'user', content: said});
    return {messages: structuredClone(this.messages), max_tokens, ...this.extra};
  }
  answer(reply) {
    const message = {role: 'assistant', content: reply.content};
    if (this.keep) message.reasoning_content = reply.reasoning;
    this.messages.push(message);
  }
}

// 20 questions behind one system prompt of 2,000 tokens.
async function sharedSystem(test, server, make) {
  let least = Infinity;
  for (let i = 0; i < 20; ++i) {
    const length = 10 + Math.round((i * 590) / 19);
    const request = await make(i, length);
    const reply = await test.ask(server, request, `question ${i}`, {whole: i % 2 === 1});
    if (i > 0) {
      least = Math.min(least, reply.cached);
      test.check(reply.cached >= 1792, `question ${i} of ${length} tokens: ${test.found(reply)}`);
    }
    if (test.long || i === 11) await test.same(request, reply, `question ${i}`);
  }
  test.note(`at least ${least} of 2000 tokens found from the second question on`);
}

async function turns(test, thinking, keep) {
  const server = await test.serve('--max-num-seqs', 9, '--max-model-len', 262144);
  const texts = await test.texts();
  const longer = test.long ? 10 : 1;
  const main = new Talk({thinking}, keep);
  const others = Array.from({length: 8}, () => new Talk({}, false));
  let before = {prompt: 0, cached: -1};
  let worst = 0;
  for (let turn = 0; turn < 30; ++turn) {
    for (const who of [turn % 8, (turn + 3) % 8]) {
      const other = others[who];
      const request = other.request(await texts.string(1000 + 50 * who + turn, 60 * longer), 4);
      other.answer(await test.ask(server, request, `session ${who + 2}, turn ${turn + 1}`));
    }
    const said = await texts.string(2000 + turn, longer * (100 + ((turn * 67) % 201)));
    const request = main.request(said, 24);
    const reply = await test.ask(server, request, `turn ${turn + 1}`);
    if (turn > 0) {
      test.check(
          reply.cached >= down(before.prompt),
          `turn ${turn + 1}: the last prompt had ${before.prompt} tokens; ${test.found(reply)}`);
      test.check(
          reply.cached > before.cached,
          `turn ${turn + 1}: ${before.cached} tokens found in the last turn, now ${reply.cached}`);
      worst = Math.max(worst, before.prompt - reply.cached);
    }
    before = {prompt: reply.usage.prompt_tokens, cached: reply.cached};
    if (turn === 29 || (test.long && turn % 5 === 4)) {
      await test.same(request, reply, `turn ${turn + 1}`);
    }
    main.answer(reply);
  }
  test.note(`${before.prompt} tokens in the end; never more than ${
      worst} tokens of the last prompt computed again`);
  await test.returned(server, 'after 30 turns');
}

async function sharedSystemMessage(test) {
  const server = await test.serve('--max-model-len', 8192, '--max-num-seqs', 4);
  const texts = await test.texts();
  const system = await texts.string(1, 2000);
  await sharedSystem(test, server, async (i, length) => ({
                                     messages: [
                                       {role: 'system', content: system},
                                       {role: 'user', content: await texts.string(100 + i, length)}
                                     ],
                                     max_tokens: 12,
                                   }));
}

async function sharedPlainPrefix(test) {
  const server = await test.serve('--max-model-len', 8192, '--max-num-seqs', 4);
  const texts = await test.texts();
  const system = texts.ids(2, 2000);
  await sharedSystem(test, server, async (i, length) => ({
                                     prompt: [...system, ...texts.ids(100 + i, length)],
                                     max_tokens: 12,
                                   }));
}


async function longSessions(test) {
  const length = test.long ? 200000 : 20000;
  // Rows of both, with room for what is added.
  const server = await test.serve(
      '--max-num-seqs', 2, '--max-model-len', test.long ? 262144 : 32768, '--kv-cache-memory',
      test.long ? 300e6 : 60e6);
  const {blocks} = await server.metrics();
  test.check(
      blocks.total > (2 * (length + 1000)) / kBlock, `${blocks.total} blocks do not hold both`);
  const texts = await test.texts();
  const sessions = [3, 4].map((seed) => texts.ids(seed, length));
  const first = [];
  for (let round = 0; round < 3; ++round) {
    for (let who = 0; who < 2; ++who) {
      const request = {prompt: sessions[who], max_tokens: 16, ignore_eos: true};
      const reply = await test.ask(server, request, `round ${round + 1}, session ${'AB'[who]}`);
      const share = reply.cached / request.prompt.length;
      if (round > 0) {
        test.check(share > 0.99, `round ${round + 1}, session ${'AB'[who]}: ${test.found(reply)}`);
      }
      // Nothing of it was cached the first time, so that is what it says cold.
      if (round === 0) first[who] = reply;
      if (round === 1) {
        const same = reply.text === first[who].text &&
            reply.logprobs.join() === first[who].logprobs.join();
        test.check(same, `session ${'AB'[who]}: ${reply.text}, the first time ${first[who].text}`);
      }
      if (test.long) await test.same(request, reply, `round ${round + 1}, session ${'AB'[who]}`);
      test.note(
          `${'AB'[who]}: ${(100 * share).toFixed(2)} % of ${request.prompt.length} tokens found, ` +
          `first token after ${reply.ttft?.toFixed(2)} s`);
      if (round === 1) sessions[who] = [...sessions[who], ...texts.ids(30 + who, 100)];
    }
  }
}

async function repeats(test) {
  const server = await test.serve('--max-model-len', 16384, '--max-num-seqs', 4);
  const texts = await test.texts();
  const ask = async (request, times, what, hit) => {
    for (let i = 0; i < times; ++i) {
      const reply = await test.ask(server, request, `${what}, time ${i + 1}`);
      await test.same(request, reply, `${what}, time ${i + 1}`);
      if (i > 0 && hit) {
        test.check(
            reply.cached === reply.usage.prompt_tokens - 1 && reply.report.reason_code === 'none',
            `${what}, time ${i + 1}: ${test.found(reply)}`);
      }
    }
  };
  const content = await texts.string(5, 7700);
  await ask({messages: [{role: 'user', content}], max_tokens: 24}, 5, '7.7K', true);
  // Shorter than what is worth saving.
  await ask(
      {messages: [{role: 'user', content: 'Capital of France? One word.'}], max_tokens: 24}, 3,
      'France', false);
  for (const length of [127, 128, 129, 255, 256, 257, 511, 512, 513]) {
    await ask(
        {prompt: texts.ids(600 + length, length), max_tokens: 24}, 2, `${length} tokens`, true);
  }
}

async function lengthsModulo4(test) {
  const server = await test.serve('--max-model-len', test.long ? 65536 : 8192, '--max-num-seqs', 4);
  const random = randomSource(32);
  const planted = facts(random, test.long ? 20 : 5);
  const document = plantedDocument(random, test.long ? 165000 : 6500, planted);
  const right = [0, 0, 0, 0];
  const asked = [0, 0, 0, 0];
  for (const [i, fact] of planted.entries()) {
    for (let pad = 0; pad < 4; ++pad) {
      // '.\n' is one token.
      const content = `${document}\n\n${'.\n'.repeat(pad)}${fact.question}`;
      const request = {messages: [{role: 'user', content}], max_tokens: 40};
      const first = await test.ask(server, request, `fact ${i + 1}, first`);
      const modulo = first.usage.prompt_tokens % 4;
      const what = `fact ${i + 1}, ${first.usage.prompt_tokens} tokens (${modulo} mod 4)`;
      const again = await test.ask(server, request, `${what}, again`);
      // Fewer than 64 new tokens are not worth a bundle.
      test.check(
          again.cached >= again.usage.prompt_tokens - 64, `${what}, again: ${test.found(again)}`);
      test.check(
          first.text === again.text,
          `${what}: first ${JSON.stringify(first.text)}, again ${JSON.stringify(again.text)}`);
      if (test.long ? i % 10 === 0 : i === 2) await test.same(request, again, what);
      ++asked[modulo];
      if (again.text.trim() === fact.answer)
        ++right[modulo];
      else
        test.note(`${what}: wanted ${fact.answer}, got ${again.text}`);
    }
  }
  test.note(`right by length modulo 4: ${right.map((n, i) => `${n} of ${asked[i]}`).join(', ')}`);
  for (let modulo = 0; modulo < 4; ++modulo) {
    test.check(
        asked[modulo] > 0 && right[modulo] >= 0.9 * asked[modulo],
        `${right[modulo]} of ${asked[modulo]} right at ${modulo} mod 4`);
  }
}

async function usageFields(test) {
  const server = await test.serve('--max-model-len', 8192, '--max-num-seqs', 4);
  const texts = await test.texts();
  const request = {
    messages: [{role: 'user', content: await texts.string(67, 4000)}],
    max_tokens: 4
  };
  await test.ask(server, request, 'first');
  for (const whole of [false, true]) {
    const {usage} = await test.ask(server, request, `second, whole ${whole}`, {whole});
    test.check(
        usage.prompt_tokens_details.cached_tokens === usage.prompt_tokens - 1 &&
            usage.prompt_cache_hit_tokens === usage.prompt_tokens - 1 &&
            usage.prompt_cache_miss_tokens === 1,
        `whole ${whole}: ${JSON.stringify(usage)}`);
  }
}

async function salts(test) {
  const server = await test.serve('--max-model-len', 4096, '--max-num-seqs', 4);
  const texts = await test.texts();
  const content = await texts.string(7, 600);
  const ask = async (cache_salt, code, hit) => {
    const request = {messages: [{role: 'user', content}], max_tokens: 8, cache_salt};
    const what = `salt ${cache_salt}`;
    const reply = await test.ask(server, request, what);
    test.check(
        reply.report.reason_code === code &&
            (hit ? reply.cached === reply.usage.prompt_tokens - 1 : reply.cached === 0),
        `${what}: ${test.found(reply)} (${reply.report.reason_code})`);
    if (code === 'salt_differs')
      test.check(reply.report.reason === 'salt differs', `${what}: ${reply.report.reason}`);
    await test.same(request, reply, what);
  };
  await ask('a', 'nothing_cached', false);
  await ask('b', 'salt_differs', false);
  await ask(undefined, 'salt_differs', false);
  for (const salt of ['a', 'b', undefined]) await ask(salt, 'none', true);
}

async function retention(test) {
  const server = await test.serve('--max-model-len', 4096, '--max-num-seqs', 2);
  const texts = await test.texts();
  const {blocks} = await server.metrics();
  // The retained ones are older: without their names they would go first. The second comes back
  // without its reasoning, so it needs the windows at the end of the prompt, not of the answer.
  const talks = [];
  for (const [name, extra] of [
           ['kept', {}], ['kept, thinking', {thinking: true}], ['not kept', {}]]) {
    const talk = new Talk(extra, false);
    const request = talk.request(await texts.string(70 + talks.length, 600), 8);
    if (name !== 'not kept') request.fathom = {session: name, ttl: 600};
    const reply = await test.ask(server, request, name);
    talk.answer(reply);
    talks.push({name, talk, prompt: reply.usage.prompt_tokens});
  }
  let used = 0;
  for (let i = 0; used < 1.5 * blocks.total; ++i, used += 3000 / kBlock) {
    await test.ask(server, {prompt: texts.ids(80 + i, 3000), max_tokens: 2}, `pressure ${i}`);
  }
  for (const {name, talk, prompt} of talks.reverse()) {
    const request = talk.request('And then?', 8);
    const reply = await test.ask(server, request, `${name}, again`);
    if (name === 'not kept') {
      test.check(
          reply.cached === 0 && /_evicted$/.test(reply.report.reason_code),
          `it was not evicted, so nothing is proven: ${test.found(reply)}`);
    } else {
      test.check(
          reply.cached >= down(prompt),
          `the session '${name}' of ${prompt} tokens: ${test.found(reply)}`);
      await test.same(request, reply, `${name}, again`);
    }
  }
}

module.exports = {
  'B21: a system message is found from the second chat on': sharedSystemMessage,
  'B21: the same for plain prompts, where no message ends': sharedPlainPrefix,
  'B20: 30 turns among eight other sessions': (test) => turns(test, false, false),
  'B27: thinking, reasoning returned in the history': (test) => turns(test, true, true),
  'B27: thinking, reasoning dropped from the history': (test) => turns(test, true, false),
  'B22: two long sessions that fit the pool together do not evict each other': longSessions,
  'B24: repeats say the same, at every awkward length': repeats,
  'B32: facts are found whatever the length modulo 4, first and repeated': lengthsModulo4,
  'B67: cached tokens stand where clients read them, streamed and whole': usageFields,
  'salts: what one tenant cached another does not find': salts,
  'retention: sessions kept by name survive what evicts the others': retention,
};
