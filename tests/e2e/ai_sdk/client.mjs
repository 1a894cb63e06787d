// Asks a server what Vercel's `ai` asks: node client.mjs BASE_URL. Prints what came, as one JSON.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "pagestream",
  baseURL: process.argv[2],
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = {
  model: provider("demo"),
  prompt: "What is the capital of France?",
  temperature: 0,
  maxOutputTokens: 24,
  maxRetries: 0,
};
const schema = z.object({ dish: z.enum(["soup", "rice"]), number: z.enum(["one", "two"]) });
const tools = {
  order: tool({ description: "Order a dish", inputSchema: schema }),
};
const forced = { ...asked, tools, toolChoice: "required", maxOutputTokens: 300 };

const whole = await generateText(asked);
const streamed = streamText(asked);
let text = "";
for await (const piece of streamed.textStream) text += piece;

const called = await generateText(forced);
const calling = streamText(forced);
for await (const _ of calling.fullStream);

const made = await generateObject({ ...asked, schema, maxOutputTokens: 200 });
const making = streamObject({ ...asked, schema, maxOutputTokens: 200 });
for await (const _ of making.partialObjectStream);

let refused = null;
try {
  await generateText({ ...asked, temperature: 3 });
} catch (error) {
  if (!APICallError.isInstance(error)) throw error;
  refused = { status: error.statusCode, message: error.message, retryable: error.isRetryable };
}

const calls = (found) => found.map((call) => ({ name: call.toolName, input: call.input }));
console.log(
  JSON.stringify({
    text: whole.text,
    streamedText: text,
    usage: whole.usage,
    streamedUsage: await streamed.usage,
    finishReason: whole.finishReason,
    calls: calls(called.toolCalls),
    streamedCalls: calls(await calling.toolCalls),
    callFinishReason: called.finishReason,
    object: made.object,
    streamedObject: await making.object,
    refused,
  }),
);
