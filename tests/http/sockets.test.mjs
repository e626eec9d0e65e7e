// Clients that break the protocol, go away or send nonsense.
import assert from 'node:assert/strict';
import net from 'node:net';
import { after, before, test } from 'node:test';
import { chat, expectIdle, pools, raw, startServer } from './harness.mjs';

let server, start;
before(async () => {
  server = await startServer();
  start = await pools(server);
});
after(() => server.stop());

const post = (body, path = '/v1/chat/completions') =>
  `POST ${path} HTTP/1.1\r\nHost: t\r\nContent-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;

test('malformed HTTP gets 400 and JSON', async () => {
  for (const bytes of ['\x00\x01\x02\r\n\r\n', 'HELLO\r\n\r\n', 'GET\r\n\r\n',
                       'GET / HTTP/1.1\r\nbroken header\r\n\r\n',
                       'POST /v1/completions HTTP/1.1\r\nContent-Length: 1e5\r\n\r\n{}',
                       'POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n']) {
    const reply = await raw(server.port, bytes);
    assert.match(reply, /^HTTP\/1\.1 400 /, JSON.stringify(bytes));
    assert.ok(JSON.parse(reply.slice(reply.indexOf('\r\n\r\n') + 4)).error.message);
  }
  assert.equal((await server.get('/health')).status, 200);
});

test('wrong types are 400 with the field, never 500', async () => {
  const values = [null, true, 7, -1, 1e308, 'text', [], [null], {}, { a: 1 }, [[1]], [['x']], ''];
  const fields = ['messages', 'prompt', 'stream', 'stream_options', 'n', 'temperature', 'top_p', 'top_k',
                  'min_p', 'stop', 'stop_token_ids', 'seed', 'presence_penalty', 'frequency_penalty',
                  'repetition_penalty', 'logit_bias', 'logprobs', 'top_logprobs', 'prompt_logprobs', 'echo',
                  'ignore_eos', 'min_tokens', 'max_completion_tokens', 'tools', 'tool_choice',
                  'response_format', 'reasoning_effort', 'thinking', 'enable_thinking',
                  'chat_template_kwargs', 'priority', 'model', 'user', 'return_token_ids'];
  for (const [path, base] of [['/v1/chat/completions', chat('x', { max_tokens: 1 })],
                              ['/v1/completions', { prompt: 'x', max_tokens: 1 }]]) {
    for (const field of fields) {
      for (const value of values) {
        const reply = await server.post(path, { ...base, [field]: value });
        const text = await reply.text();
        assert.ok([200, 400, 404].includes(reply.status), `${path} ${field} ${JSON.stringify(value)}: ${text}`);
        if (reply.status !== 400) continue;
        const error = JSON.parse(text).error;
        assert.ok(error.param !== null && error.param.length > 0,
                  `${field} ${JSON.stringify(value)}: ${text}`);
      }
    }
  }
  await expectIdle(server, start);
});

test('fields that would change the reply are refused, their neutral values are not', async () => {
  for (const [field, refused, neutral] of [['allowed_token_ids', [65], null], ['bad_words', ['a'], []],
                                           ['truncate_prompt_tokens', 5, null], ['chat_template', '{{ x }}', ''],
                                           ['modalities', ['audio'], ['text']], ['best_of', 2, 1],
                                           ['documents', [{}], []], ['made_up', null, 5]]) {
    const body = chat('x', { max_tokens: 1 });
    if (refused !== null) {
      const reply = await server.post('/v1/chat/completions', { ...body, [field]: refused });
      assert.equal(reply.status, 400, field);
      const { error } = await reply.json();
      assert.deepEqual([error.param, error.code], [field, 'unsupported']);
    }
    const taken = await server.post('/v1/chat/completions', { ...body, [field]: neutral });
    assert.equal(taken.status, 200, `${field}: ${await taken.text()}`);
  }
  const broken = await server.post('/v1/chat/completions', '{"a": 1,}');
  assert.ok(broken.headers.get('date'));
  assert.match((await broken.json()).error.message, /^the body is not JSON: unexpected '}'.* at byte 9$/);
  await expectIdle(server, start);
});

test('bodies that are no JSON', async () => {
  for (const body of ['', '{', 'null', '"x"', '[1]', '{"a":', '{"a":1e999}', '{"messages":"\\ud800"}',
                      '{"a":' + '['.repeat(100000)]) {
    assert.equal((await server.post('/v1/chat/completions', body)).status, 400, body.slice(0, 30));
  }
  const invalid = await fetch(server.base + '/v1/chat/completions',
                              { method: 'POST', body: Buffer.from([0x7b, 0x22, 0xff, 0x22, 0x3a, 0x31, 0x7d]) });
  assert.equal(invalid.status, 400);
});

test('five hundred disconnects at random moments', async () => {
  let seed = 12345;
  const random = (n) => (seed = (seed * 1103515245 + 12345) & 0x7fffffff) % n;
  const one = () => new Promise((resolve) => {
    const body = JSON.stringify(chat('a word of a long prompt '.repeat(1 + random(60)), {
      stream: random(2) === 0, max_tokens: 1000, ignore_eos: true, n: 1 + random(2) }));
    const request = post(body);
    const part = random(4) === 0 ? random(request.length) : request.length;
    const socket = net.connect(server.port, '127.0.0.1', () => {
      socket.write(request.slice(0, part));
      setTimeout(() => (random(2) ? socket.destroy() : socket.resetAndDestroy()), random(60));
    });
    socket.on('error', () => {});
    socket.on('close', resolve);
  });
  for (let i = 0; i < 500; i += 20) await Promise.all(Array.from({ length: 20 }, one));
  await expectIdle(server, start);
  assert.equal((await server.get('/health')).status, 200);
  // Replies that nobody reads any more end a moment after their requests.
  for (let i = 0; i < 300; ++i) {
    if ((await (await server.get('/load')).json()).server_load === 0) break;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  assert.equal((await (await server.get('/load')).json()).server_load, 0);
  const reply = await server.post('/v1/chat/completions', chat('Hello', { max_tokens: 4 }));
  assert.equal(reply.status, 200);
});

test('a large prompt does not stall running streams', async () => {
  const streaming = await server.post('/v1/chat/completions',
                                      chat('Hello', { stream: true, max_tokens: 400, ignore_eos: true }));
  const reader = streaming.body.getReader();
  await reader.read();
  const large = server.post('/tokenize', { prompt: 'some words of text, '.repeat(100000) });
  let longest = 0;
  let tokenising = true;
  const done = large.then(async (reply) => {
    assert.ok((await reply.json()).count > 100000);
    tokenising = false;
  });
  while (tokenising) {
    const before = performance.now();
    if ((await reader.read()).done) break;
    longest = Math.max(longest, performance.now() - before);
  }
  await done;
  await reader.cancel();
  assert.ok(longest < 1500, `a stream was silent for ${longest} ms`);
  await expectIdle(server, start);
});
