// OpenAI's own client against the server.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { chat, collect, expectIdle, OpenAI, startServer } from './harness.mjs';

let server, client;
before(async () => {
  server = await startServer();
  client = server.client();
});
after(() => server.stop());

test('models', async () => {
  const models = await client.models.list();
  assert.equal(models.data[0].id, 'demo');
  assert.equal((await client.models.retrieve('demo')).id, 'demo');
});

for (const thinking of [false, true]) {
  test(`chat, streamed and plain, thinking ${thinking}`, async () => {
    const body = chat('Hello, who are you?', { chat_template_kwargs: { thinking } });
    const plain = await client.chat.completions.create(body);
    assert.equal(plain.object, 'chat.completion');
    const message = plain.choices[0].message;
    assert.equal(message.role, 'assistant');
    assert.ok((message.content + (message.reasoning_content ?? '')).length > 0);
    assert.equal(message.reasoning_content, message.reasoning);
    const usage = plain.usage;
    assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
    assert.equal(usage.prompt_tokens,
                 usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens);
    assert.equal(usage.prompt_tokens_details.cached_tokens, usage.prompt_cache_hit_tokens);
    const streamed = await collect(await client.chat.completions.create(
      { ...body, stream: true, stream_options: { include_usage: true } }));
    assert.equal(streamed.content, message.content);
    assert.equal(streamed.reasoning, message.reasoning_content ?? '');
    assert.equal(streamed.finish, plain.choices[0].finish_reason);
    assert.equal(streamed.roles, 1);
    assert.equal(streamed.usage.completion_tokens, usage.completion_tokens);
  });
}

test('small max_tokens gives length and text', async () => {
  const reply = await client.chat.completions.create(chat('Hello', { max_tokens: 2, ignore_eos: true }));
  assert.equal(reply.choices[0].finish_reason, 'length');
  assert.equal(reply.usage.completion_tokens, 2);
  assert.ok(reply.choices[0].message.content.length > 0);
});

test('several choices and log-probabilities', async () => {
  const reply = await client.chat.completions.create(
    chat('Hello', { n: 3, temperature: 1, seed: 5, logprobs: true, top_logprobs: 4, max_tokens: 6, ignore_eos: true }));
  assert.deepEqual(reply.choices.map((choice) => choice.index), [0, 1, 2]);
  for (const choice of reply.choices) {
    assert.equal(choice.logprobs.content.length, 6);
    for (const token of choice.logprobs.content) {
      assert.equal(token.top_logprobs.length, 4);
      assert.ok(token.logprob <= 0);
      assert.ok(Array.isArray(token.bytes));
    }
  }
  const again = await client.chat.completions.create(
    chat('Hello', { n: 3, temperature: 1, seed: 5, max_tokens: 6, ignore_eos: true }));
  assert.deepEqual(again.choices.map((choice) => choice.message.content),
                   reply.choices.map((choice) => choice.message.content));
});

test('stop strings cut the text exactly', async () => {
  const body = chat('Hello, who are you?', { max_tokens: 40, ignore_eos: true });
  const whole = (await client.chat.completions.create(body)).choices[0].message.content;
  assert.ok(whole.length > 12);
  const stop = whole.slice(8, 12);
  const cut = await client.chat.completions.create({ ...body, stop: [stop] });
  assert.equal(cut.choices[0].message.content, whole.slice(0, whole.indexOf(stop)));
  assert.equal(cut.choices[0].finish_reason, 'stop');
  const streamed = await collect(await client.chat.completions.create({ ...body, stop, stream: true }));
  assert.equal(streamed.content, cut.choices[0].message.content);
});

test('completions: text, list, ids, echo, stream', async () => {
  const body = { model: 'demo', prompt: 'The Debian', max_tokens: 8, temperature: 0 };
  const one = await client.completions.create(body);
  assert.equal(one.object, 'text_completion');
  const two = await client.completions.create({ ...body, prompt: ['The Debian', 'A package'] });
  assert.equal(two.choices.length, 2);
  assert.equal(two.choices[0].text, one.choices[0].text);
  const tokens = (await (await server.post('/tokenize', { prompt: 'The Debian' })).json()).tokens;
  const ids = await client.completions.create({ ...body, prompt: tokens });
  assert.equal(ids.choices[0].text, one.choices[0].text);
  const echo = await client.completions.create({ ...body, echo: true, logprobs: 2 });
  assert.equal(echo.choices[0].text, 'The Debian' + one.choices[0].text);
  assert.equal(echo.choices[0].logprobs.token_logprobs[0], null);
  assert.ok(echo.choices[0].logprobs.tokens.length >= tokens.length + 1);
  let streamed = '';
  for await (const chunk of await client.completions.create({ ...body, stream: true })) {
    streamed += chunk.choices[0]?.text ?? '';
  }
  assert.equal(streamed, one.choices[0].text);
});

test('continuing the last assistant turn', async () => {
  const messages = [{ role: 'user', content: 'q' }, { role: 'assistant', content: 'The answer is' }];
  const body = { ...chat(''), messages };
  const reply = await client.chat.completions.create(
    { ...body, continue_final_message: true, add_generation_prompt: false });
  assert.ok(reply.choices[0].message.content.length > 0);
  await assert.rejects(
    client.chat.completions.create(
      { ...body, continue_final_message: true, add_generation_prompt: true }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === 'continue_final_message');
});

test('errors are the client library\'s classes', async () => {
  const rejected = async (body, type, check) =>
    assert.rejects(client.chat.completions.create(body),
                   (error) => error instanceof type && check(error));
  await rejected(chat('x', { model: 'gpt-none' }), OpenAI.NotFoundError,
                 (error) => error.code === 'model_not_found');
  await rejected(chat('x', { temperature: 'hot' }), OpenAI.BadRequestError,
                 (error) => error.param === 'temperature');
  await rejected(chat('x', { messages: [{ role: 'user', content: [{ type: 'image_url' }] }] }),
                 OpenAI.BadRequestError, (error) => error.param === 'messages[0].content[0].type');
  await rejected(chat('word '.repeat(9000), { stream: true }), OpenAI.BadRequestError,
                 (error) => error.code === 'context_length_exceeded' && /4096/.test(error.message));
  await rejected(chat('x', { max_tokens: 5000 }), OpenAI.BadRequestError,
                 (error) => error.code === 'context_length_exceeded');
  await expectIdle(server);
});

test('an aborted stream is cancelled', async () => {
  const stream = await client.chat.completions.create(
    chat('Hello', { stream: true, max_tokens: 3000, ignore_eos: true }));
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta?.content) break;  // ends the request
  }
  stream.controller.abort();
  await expectIdle(server);
});

test('sixty-four concurrent streams equal the sequential replies', async () => {
  const prompts = Array.from({ length: 64 }, (_, i) => `Question ${i}: what is package number ${i * 37}?`);
  const body = (text) => chat(text, { max_tokens: 12, ignore_eos: true });
  const sequential = [];
  for (const prompt of prompts) {
    sequential.push((await client.chat.completions.create(body(prompt))).choices[0].message.content);
  }
  const concurrent = await Promise.all(prompts.map(async (prompt) =>
    (await collect(await client.chat.completions.create({ ...body(prompt), stream: true }))).content));
  assert.deepEqual(concurrent, sequential);
  await expectIdle(server);
});
