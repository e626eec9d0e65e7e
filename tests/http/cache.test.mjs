// What replies tell about the prefix cache, and `fathom explain`. What the cache does is in tests/cache.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { test } from 'node:test';
import { promisify } from 'node:util';
import { startServer } from './harness.mjs';

const run = promisify(execFile);
const WORDS = 'river stone cloud lamp seven green morning letter window garden salt engine'.split(' ');

// Text of about so many tokens, the same for the same seed.
function text(words, seed) {
  let state = seed * 2654435761 + 1;
  const pick = () => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return WORDS[Math.floor(state / 65536) % WORDS.length];
  };
  return Array.from({ length: words }, pick).join(' ');
}

const ask = async (server, messages, extra = {}) => {
  const reply = await server.post('/v1/chat/completions', {
    messages, temperature: 0, max_tokens: 8, ...extra,
  });
  const json = await reply.json();
  assert.equal(reply.status, 200, JSON.stringify(json));
  return json;
};

test('cached tokens are where clients look for them, streamed or not (B67)', async () => {
  const server = await startServer();
  try {
    const messages = [{ role: 'user', content: text(1500, 1) }];
    const cold = (await ask(server, messages)).usage;
    assert.equal(cold.prompt_tokens_details.cached_tokens, 0);
    assert.equal(cold.prompt_cache_miss_tokens, cold.prompt_tokens);
    const warm = (await ask(server, messages)).usage;
    assert.equal(warm.prompt_tokens_details.cached_tokens, warm.prompt_tokens - 1);
    assert.equal(warm.prompt_cache_hit_tokens, warm.prompt_tokens - 1);
    assert.equal(warm.prompt_cache_miss_tokens, 1);
    let streamed;
    const stream = await server.client().chat.completions.create({
      model: 'demo', messages, temperature: 0, max_tokens: 8,
      stream: true, stream_options: { include_usage: true },
    });
    for await (const chunk of stream) streamed = chunk.usage ?? streamed;
    assert.deepEqual(streamed, warm);
  } finally {
    await server.stop();
  }
});

test('a reply, /v1/explain and fathom explain tell the same', async () => {
  const server = await startServer(['--api-key', 'secret']);
  try {
    const client = server.client({ apiKey: 'secret' });
    const request = {
      model: 'demo', temperature: 0, max_tokens: 8,
      messages: [{ role: 'user', content: text(700, 3) }],
      fathom: { explain: true, session: 'agent-7', ttl: 60 },
    };
    await client.chat.completions.create(request);
    request.messages[0].content = request.messages[0].content.slice(0, 2000) + ' and then otherwise';
    const reply = await client.chat.completions.create(request);
    assert.notEqual(reply.fathom.reason_code, 'none');
    assert.ok(reply.fathom.tokens_matched > 0);
    assert.equal(reply.fathom.boundary, reply.usage.prompt_cache_hit_tokens);

    const headers = { Authorization: 'Bearer secret' };
    const target = `${server.base}/v1/explain/${reply.id}`;
    assert.equal((await fetch(target)).status, 401);
    const entry = await (await fetch(target, { headers })).json();
    assert.deepEqual(entry.fathom, reply.fathom);
    assert.equal(entry.session, 'agent-7');

    const flags = ['explain', reply.id, '--url', server.base, '--api-key', 'secret'];
    const table = (await run(process.env.FATHOM_BINARY, flags)).stdout;
    assert.ok(table.includes(reply.fathom.reason), table);
    assert.ok(table.includes('agent-7'), table);
    const raw = (await run(process.env.FATHOM_BINARY, [...flags, '--json'])).stdout;
    assert.deepEqual(JSON.parse(raw), entry);
  } finally {
    await server.stop();
  }
});
